"""What a config.json says of a decoder: the sizes that its memory follows from."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

FAMILIES = ("llama", "qwen2", "qwen3", "qwen3_moe")


class PlanRefused(ValueError):
    """Nothing can be planned; the message says why in one sentence."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Experts:
    count: int
    per_token: int
    width: int
    """Of one expert's hidden layer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelShape:
    vocab_size: int
    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    """Of the layers without experts."""
    max_context_length: int
    tied: bool
    """The head is the embedding."""
    qkv_bias: bool = False
    out_bias: bool = False
    """Of the attention's output."""
    mlp_bias: bool = False
    qk_norm: bool = False
    experts: Experts | None = None
    expert_layers: frozenset[int] = frozenset()
    """Which layers have experts in place of one MLP."""

    @property
    def query_size(self) -> int:
        return self.num_heads * self.head_dim

    @property
    def kv_size(self) -> int:
        """Of the keys, or of the values."""
        return self.num_kv_heads * self.head_dim

    @property
    def num_experts(self) -> int:
        return self.experts.count if self.experts else 0

    @property
    def kinds_of_layer(self) -> list[int]:
        """A layer of each kind there is: with experts, without."""
        plain = next((i for i in range(self.num_layers) if i not in self.expert_layers), None)
        return [i for i in (min(self.expert_layers, default=None), plain) if i is not None]

    @classmethod
    def of(cls, config: Mapping[str, Any]) -> ModelShape:
        """Of a Hugging Face config. Raises PlanRefused for another family of models, or where a
        size is missing or no count."""
        family = config.get("model_type")
        if family not in FAMILIES:
            raise PlanRefused(
                f"model_type {family!r} is none of {', '.join(FAMILIES)}, whose memory is known"
            )
        num_layers, num_heads = _count(config, "num_hidden_layers"), _count(config, _HEADS)
        hidden_size = _count(config, "hidden_size")
        experts = _experts(config) if family == "qwen3_moe" else None
        attention_bias = bool(config.get("attention_bias", False))
        return cls(
            vocab_size=_count(config, "vocab_size"),
            hidden_size=hidden_size,
            num_layers=num_layers,
            num_heads=num_heads,
            num_kv_heads=_count(config, "num_key_value_heads", num_heads),
            head_dim=_count(config, "head_dim", _default_head_dim(family, hidden_size, num_heads)),
            intermediate_size=_count(config, "intermediate_size"),
            max_context_length=_count(config, "max_position_embeddings"),
            tied=bool(config.get("tie_word_embeddings", False)),
            qkv_bias=family == "qwen2" or attention_bias,
            out_bias=attention_bias,
            mlp_bias=bool(config.get("mlp_bias", False)),
            qk_norm=family.startswith("qwen3"),
            experts=experts,
            expert_layers=_expert_layers(config, num_layers) if experts else frozenset(),
        )


_HEADS = "num_attention_heads"


def _default_head_dim(family: str, hidden_size: int, num_heads: int) -> int:
    return 128 if family == "qwen3" else hidden_size // num_heads


def _experts(config: Mapping[str, Any]) -> Experts:
    # transformers 5 writes the count under another name than the published configs have.
    name = "num_experts" if "num_experts" in config else "num_local_experts"
    return Experts(
        count=_count(config, name),
        per_token=_count(config, "num_experts_per_tok"),
        width=_count(config, "moe_intermediate_size"),
    )


def _expert_layers(config: Mapping[str, Any], num_layers: int) -> frozenset[int]:
    step = _count(config, "decoder_sparse_step", 1)
    dense = set(config.get("mlp_only_layers") or ())
    return frozenset(i for i in range(num_layers) if (i + 1) % step == 0 and i not in dense)


def _count(config: Mapping[str, Any], name: str, default: int | None = None) -> int:
    value = config.get(name)
    if value is None:
        value = default
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise PlanRefused(f"{name} of config.json is {value!r}, not a count of 1 or more")
    return value
