"""Attention over packed rows: the base model asks one plan object, whatever the pass is for.

Shapes: H query heads, G key/value heads, T tokens of the packed row, D head size.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AttentionInterface
from transformers.masking_utils import AttentionMaskInterface

NAME = "hearth_packed"


class AttentionPlan(Protocol):
    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
        """q[H, T, D], k[G, T, D], v[G, T, D] -> [H, T, D]"""
        ...


class PackedAttention:
    """Causal attention inside each of several sequences that lie end to end in one row: costs
    the sum of their squares, and nothing crosses from one to the next."""

    def __init__(self, lengths: Sequence[int]) -> None:
        self.bounds = list(pairwise(accumulate(lengths, initial=0)))

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
        grouped = q.shape[0] != k.shape[0]
        parts = [
            F.scaled_dot_product_attention(
                q[None, :, start:end],
                k[None, :, start:end],
                v[None, :, start:end],
                is_causal=True,
                scale=scale,
                enable_gqa=grouped,
            )
            for start, end in self.bounds
        ]
        return torch.cat(parts, dim=2)[0]


def _attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: None,
    *,
    attention_plan: AttentionPlan,
    scaling: float,
    **_: Any,
) -> tuple[Tensor, None]:
    """The interface transformers calls: [1, H, T, D] in, [1, T, H, D] out."""
    layer: int = module.layer_idx  # pyrefly: ignore[bad-assignment]
    out = attention_plan.attend(layer, query[0], key[0], value[0], scaling)
    return out.transpose(0, 1)[None].contiguous(), None


def register() -> None:
    """Make `attn_implementation="hearth_packed"` known to transformers; harmless to repeat."""
    AttentionInterface.register(NAME, _attend)
    # The plan says who sees whom; a [T, T] mask must never be built.
    AttentionMaskInterface.register(NAME, lambda *args, **kwargs: None)
