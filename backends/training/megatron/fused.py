"""Which layers of the original model are fused in which of Megatron's.

Shapes: H query heads, G key/value heads, D head size; of the whole model.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any, NamedTuple

from megatron.bridge.models.gpt_provider import GPTModelProvider

from backends.lora.adapter import Target
from backends.lora.parts import Bounds
from backends.training.shares import Share


class Fused(NamedTuple):
    """One of Megatron's parallel linear layers."""

    path: str
    """From its transformer layer."""
    column: bool
    """Whether its outputs are divided among ranks, not its inputs."""
    targets: tuple[Target, ...]
    """The layers in it, in the order of its outputs."""
    expert: int | None = None
    """Whose it is, counted over all ranks, where the layer has experts."""

    def shares(self, rank: int, num_ranks: int) -> Iterator[tuple[str, Share]]:
        """What one of the ranks that share the layer has of each of its targets."""
        for target in self.targets:
            inputs, outputs = (0, target.in_features), (0, target.out_features)
            if self.column:
                outputs = even_slice(target.out_features, rank, num_ranks)
            else:
                inputs = even_slice(target.in_features, rank, num_ranks)
            yield target.name, Share(inputs, outputs)


def even_slice(size: int, rank: int, num_ranks: int) -> Bounds:
    step = size // num_ranks
    return rank * step, (rank + 1) * step


def fused_layers(
    config: GPTModelProvider, registry: Any, layer: int, *, sparse: bool
) -> list[Fused]:
    """Those of transformer layer `layer`, counted from 0 over all pipeline stages, in the order
    of the original's modules; of all experts if it is `sparse`. `registry` is the bridge's, which
    knows the names of both sides."""
    hidden, size = config.hidden_size, config.kv_channels
    query, kv = config.num_attention_heads * size, config.num_query_groups * size
    in_layer = partial(_fused, registry, f"decoder.layers.{layer}.")
    attention = [
        in_layer("self_attention.linear_qkv", "attn", True, hidden, (query, kv, kv)),
        in_layer("self_attention.linear_proj", "attn", False, query, (hidden,)),
    ]
    path = "mlp.experts" if sparse else "mlp"
    inner = config.moe_ffn_hidden_size if sparse else config.ffn_hidden_size
    assert inner is not None
    return attention + [
        fused
        for expert in (range(config.num_moe_experts or 0) if sparse else [None])
        for fused in (
            in_layer(f"{path}.linear_fc1", "mlp", True, hidden, (inner, inner), expert),
            in_layer(f"{path}.linear_fc2", "mlp", False, inner, (hidden,), expert),
        )
    ]


def _fused(
    registry: Any,
    prefix: str,
    path: str,
    group: str,
    column: bool,
    num_in: int,
    sizes: tuple[int, ...],
    expert: int | None = None,
) -> Fused:
    weight = f"{prefix}{path}.weight{'' if expert is None else expert}"
    return Fused(path, column, _targets(registry, weight, group, num_in, sizes), expert)


def _targets(
    registry: Any, weight: str, group: str, num_in: int, sizes: tuple[int, ...]
) -> tuple[Target, ...]:
    weights = registry.megatron_to_hf_lookup(weight).hf_param
    names = [weights] if isinstance(weights, str) else list(weights.values())
    return tuple(
        Target(name.removesuffix(".weight"), group, num_in, num_out)
        for name, num_out in zip(names, sizes, strict=True)
    )
