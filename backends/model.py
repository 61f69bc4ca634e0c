"""The frozen base model: loaded once, its targeted layers wrapped for many adapters.

Shapes: T tokens of a packed row, E hidden size, V vocabulary.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Self

import torch
from torch import Tensor, nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    GenerationConfig,
    PretrainedConfig,
    PreTrainedModel,
)

from backends.batching import attention
from backends.batching.attention import AttentionPlan
from backends.batching.recompute import Recompute, current
from backends.lora.adapter import UNEMBED as UNEMBED
from backends.lora.adapter import Target
from backends.lora.linear import MultiLoRALinear, Segments
from backends.lora.parts import Part

_GROUPS = {
    "attn": re.compile(r"\.self_attn\.(q|k|v|o)_proj$"),
    "mlp": re.compile(r"\.mlp\.(gate|up|down)_proj$"),
}


class UnsupportedModelError(Exception):
    """The model cannot be served by this backend; the message says which part of it."""


class FrozenModel:
    """One base model in memory. `hidden` runs its layers over a packed row under any mix of
    adapters; the head is left to the caller, who needs it in chunks (`lora/head.py`)."""

    def __init__(
        self, model: PreTrainedModel, config: PretrainedConfig, eos: tuple[int, ...]
    ) -> None:
        self._model = model
        self._config = config
        self._segments = Segments()
        self.eos_token_ids = eos
        self._layers = model.get_submodule(model.base_model_prefix)
        self.targets = self._wrap()
        self._recompute = Recompute(self._layers.get_submodule("layers").children(), self._segments)

    @classmethod
    def load(cls, path: str | Path, dtype: torch.dtype, device: torch.device) -> Self:
        """Raises UnsupportedModelError, or OSError when the folder holds no model."""
        attention.register()
        config = AutoConfig.from_pretrained(path)
        _refuse_experts(config)
        refuse_partial_attention(config)
        model = AutoModelForCausalLM.from_pretrained(
            path, config=config, dtype=dtype, attn_implementation=attention.NAME
        )
        model.to(device).requires_grad_(False).eval()
        return cls(model, config, eos_token_ids(path, config))

    @property
    def head_weight(self) -> Tensor:
        """[V, E]"""
        return self._model.get_submodule(UNEMBED).get_parameter("weight")

    @property
    def name(self) -> str:
        """What the model was loaded from."""
        return self._config.name_or_path or self._config.model_type

    @property
    def vocab_size(self) -> int:
        return self.head_weight.shape[0]

    @property
    def max_context_length(self) -> int:
        return self._config.max_position_embeddings

    @property
    def num_parameters(self) -> int:
        return sum(p.numel() for p in self._model.parameters())

    @property
    def num_bytes(self) -> int:
        return sum(p.nbytes for p in self._model.parameters())

    @property
    def device(self) -> torch.device:
        return self.head_weight.device

    @property
    def dtype(self) -> torch.dtype:
        return self.head_weight.dtype

    @property
    def groups(self) -> tuple[str, ...]:
        present = {target.group for target in self.targets}
        return tuple(group for group in ("attn", "mlp", "unembed") if group in present)

    def hidden(
        self,
        tokens: Tensor,
        positions: Tensor,
        segments: Sequence[Part],
        plan: AttentionPlan,
        *,
        recompute: bool = False,
    ) -> Tensor:
        """Last hidden states [T, E] of tokens[T] at positions[T] of their own sequences. With
        `recompute` a layer keeps its input alone for backward, which computes the layer again."""
        with current(self._segments, segments), self._recompute.turned(recompute):
            out = self._layers(
                input_ids=tokens[None],
                position_ids=positions[None],
                use_cache=False,
                attention_plan=plan,
            )
        return out.last_hidden_state[0]

    def _wrap(self) -> tuple[Target, ...]:
        found = []
        for name, module in list(self._model.named_modules()):
            group = next((g for g, pattern in _GROUPS.items() if pattern.search(name)), None)
            if group is None or not isinstance(module, nn.Linear):
                continue
            parent, leaf = name.rsplit(".", 1)
            wrapped = MultiLoRALinear(name, module, self._segments)
            setattr(self._model.get_submodule(parent), leaf, wrapped)
            found.append(Target(name, group, module.in_features, module.out_features))
        vocab, hidden = self.head_weight.shape
        return (*found, Target(UNEMBED, "unembed", hidden, vocab))


def _refuse_experts(config: PretrainedConfig) -> None:
    if getattr(config, "num_experts", None) or getattr(config, "num_local_experts", None):
        raise UnsupportedModelError(
            f"{config.model_type}: mixture-of-experts models need the Megatron backend"
        )


def refuse_partial_attention(config: PretrainedConfig) -> None:
    """Raises UnsupportedModelError unless every layer attends to the whole of its sequence."""
    kinds = set(getattr(config, "layer_types", None) or ["full_attention"])
    if kinds != {"full_attention"}:
        raise UnsupportedModelError(
            f"{config.model_type}: layers of kind {sorted(kinds)}; only full attention is supported"
        )


def eos_token_ids(path: str | Path, config: PretrainedConfig) -> tuple[int, ...]:
    """From generation_config.json, else config.json, as transformers' own generate does."""
    try:
        eos = GenerationConfig.from_pretrained(path).eos_token_id
    except OSError:
        eos = config.eos_token_id
    if eos is None:
        return ()
    return tuple(eos) if isinstance(eos, list) else (eos,)
