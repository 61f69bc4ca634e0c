"""What a Megatron model is made of here: its own local layers, but for four of them.

Shapes: T tokens of a packed row, H query heads, G key/value heads, D head size, E hidden size; of
this rank.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from megatron.bridge.models.gpt_provider import GPTModelProvider
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.transformer.attention import SelfAttention
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import (
    TransformerBlockSubmodules,
    get_num_layers_to_build,
)
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import get_transformer_layer_offset
from torch import Tensor, nn
from torch.nn import Parameter

from backends.batching.attention import AttentionPlan
from backends.training.megatron.experts import Experts


class RMSNorm(nn.Module):
    """Megatron refuses torch's own with sequence parallelism. A frozen weight needs nothing of
    what it fears for."""

    def __init__(
        self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5, **_: Any
    ) -> None:
        super().__init__()
        self.weight = Parameter(torch.ones(hidden_size, dtype=config.params_dtype))
        self._eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, self.weight.shape, self.weight, self._eps)


class PackedAttention(nn.Module):
    """Attends as the plan of the microbatch says, which comes in place of a mask."""

    def __init__(self, config: TransformerConfig, layer_number: int, **_: Any) -> None:
        super().__init__()
        self._layer = layer_number - 1
        self._scale = config.softmax_scale or config.kv_channels**-0.5

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, attention_mask: AttentionPlan, **_: Any
    ) -> Tensor:
        """query[T, 1, H, D], key and value[T, 1, G, D] -> [T, 1, H * D]"""
        q, k, v = (t[:, 0].transpose(0, 1) for t in (query, key, value))
        out = attention_mask.attend(self._layer, q, k, v, self._scale)
        return out.transpose(0, 1).flatten(1)[:, None]


class BlockwiseSelfAttention(SelfAttention):
    """Where Megatron has query, key and value group by group in the rows of `linear_qkv`, here
    they are three blocks (`in_blocks`): so each is a matrix that adapters can be added to."""

    def get_query_key_value_tensors(
        self, hidden_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor, Tensor]:
        """hidden_states[T, 1, E] -> [T, 1, H, D], [T, 1, G, D], [T, 1, G, D]"""
        qkv, _ = self.linear_qkv(hidden_states)
        heads = qkv.unflatten(-1, (-1, self.hidden_size_per_attention_head))
        groups = self.num_query_groups_per_partition
        query, key, value = heads.split(
            (self.num_attention_heads_per_partition, groups, groups), dim=2
        )
        if self.q_layernorm is not None:
            query = self.q_layernorm(query)
        if self.k_layernorm is not None:
            key = self.k_layernorm(key)
        return query, key, value


def in_blocks(rows: Tensor, num_groups: int, num_heads: int) -> Tensor:
    """Rows [G * (H/G + 2) * D, ...] in Megatron's order, as [H * D + 2 * G * D, ...] in blocks."""
    by_group = rows.unflatten(0, (num_groups, num_heads // num_groups + 2, -1))
    blocks = by_group.split((num_heads // num_groups, 1, 1), dim=1)
    return torch.cat([block.flatten(0, 2) for block in blocks])


def by_group(rows: Tensor, num_groups: int, num_heads: int) -> Tensor:
    """The inverse of `in_blocks`."""
    sizes = [len(rows) // (num_heads + 2 * num_groups) * n for n in (num_heads, *[num_groups] * 2)]
    blocks = [block.unflatten(0, (num_groups, -1)) for block in rows.split(sizes)]
    return torch.cat(blocks, dim=1).flatten(0, 1)


def block_spec(config: GPTModelProvider) -> TransformerBlockSubmodules:
    """The layers of this pipeline stage."""
    sparse = is_sparse(config)
    first = get_transformer_layer_offset(config)
    own = sparse[first : first + get_num_layers_to_build(config)]
    layers = [_layer(config, num_experts=config.num_moe_experts if s else None) for s in own]
    return TransformerBlockSubmodules(layer_specs=layers, layer_norm=RMSNorm)


def is_sparse(config: GPTModelProvider) -> list[bool]:
    """Whether each layer of the model has experts in place of one MLP."""
    if config.num_moe_experts is None:
        return [False] * config.num_layers
    assert isinstance(config.moe_layer_freq, list)
    return [bool(sparse) for sparse in config.moe_layer_freq]


def _layer(config: GPTModelProvider, num_experts: int | None) -> ModuleSpec:
    layer = get_gpt_layer_local_spec(
        num_experts=num_experts,
        qk_layernorm=config.qk_layernorm,
        normalization=config.normalization,
    )
    parts = layer.submodules
    if num_experts is not None:
        parts.mlp.submodules.experts = ModuleSpec(module=Experts)
    parts.input_layernorm = parts.pre_mlp_layernorm = RMSNorm
    parts.self_attention.module = BlockwiseSelfAttention
    attention = parts.self_attention.submodules
    attention.core_attention = PackedAttention
    norm = RMSNorm if config.qk_layernorm else IdentityOp
    attention.q_layernorm = attention.k_layernorm = norm
    return layer
