"""Attention over packed rows: the base model asks one plan object, whatever the pass is for.

Shapes: H query heads, G key/value heads, T tokens of the packed row, D head size, n neighbouring
sequences of L tokens each.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, groupby
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention.varlen import varlen_attn
from transformers import AttentionInterface
from transformers.masking_utils import AttentionMaskInterface

NAME = "hearth_packed"

_CAUSAL = (-1, 0)
"""The window that the kernel knows as causal: everything to the left, nothing to the right."""


class AttentionPlan(Protocol):
    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
        """q[H, T, D], k[G, T, D], v[G, T, D] -> [H, T, D]"""
        ...


class PackedAttention:
    """Causal attention inside each of several sequences that lie end to end in one row: costs
    the sum of their squares, and nothing crosses from one to the next. Neighbours of one length
    are a batch, so many short sequences are not as many calls."""

    def __init__(self, lengths: Sequence[int]) -> None:
        self._batches = [(len(list(same)), length) for length, same in groupby(lengths)]
        """(n, L) in the order of the row."""

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
        """q[H, T, D], k[G, T, D], v[G, T, D] -> [H, T, D]"""
        sizes = [n * length for n, length in self._batches]
        # Not slices: in backward each of those would fill a whole row of zeros.
        rows = zip(q.split(sizes, 1), k.split(sizes, 1), v.split(sizes, 1), strict=True)
        parts = [
            _attend_batch(*(t.unflatten(1, batch).transpose(0, 1) for t in row), scale=scale)
            for batch, row in zip(self._batches, rows, strict=True)
        ]
        out = parts[0] if len(parts) == 1 else torch.cat(parts)
        return out.transpose(0, 1)


def _attend_batch(q: Tensor, k: Tensor, v: Tensor, *, scale: float) -> Tensor:
    """q[n, H, L, D], k[n, G, L, D], v[n, G, L, D] -> [n * L, H, D]"""
    grouped = q.shape[1] != k.shape[1]
    out = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale, enable_gqa=grouped)
    return out.transpose(1, 2).flatten(0, 1)


class VarlenAttention:
    """The same in one call of the flash kernel, which takes the sequences' bounds."""

    def __init__(self, lengths: Sequence[int], device: torch.device) -> None:
        bounds = list(accumulate(lengths, initial=0))
        self._bounds = torch.tensor(bounds, dtype=torch.int32, device=device)
        self._longest = max(lengths)

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
        """q[H, T, D], k[G, T, D], v[G, T, D] -> [H, T, D]"""
        out = varlen_attn(
            q.transpose(0, 1),
            k.transpose(0, 1),
            v.transpose(0, 1),
            cu_seq_q=self._bounds,
            cu_seq_k=self._bounds,
            max_q=self._longest,
            max_k=self._longest,
            scale=scale,
            window_size=_CAUSAL,
            enable_gqa=q.shape[0] != k.shape[0],
        )
        assert isinstance(out, Tensor)  # a pair only where the logsumexp is asked for
        return out.transpose(0, 1)


def packed_attention(
    lengths: Sequence[int], device: torch.device, dtype: torch.dtype
) -> AttentionPlan:
    """The plan for sequences of these lengths, at least one, on a model's device and dtype."""
    if _has_flash_kernel(device, dtype):
        return VarlenAttention(lengths, device)
    return PackedAttention(lengths)


def _has_flash_kernel(device: torch.device, dtype: torch.dtype) -> bool:
    half = dtype in (torch.float16, torch.bfloat16)
    return half and device.type == "cuda" and torch.cuda.get_device_capability(device) >= (8, 0)


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
