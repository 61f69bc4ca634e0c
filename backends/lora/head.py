"""The frozen unembedding in chunks: no [T, V] array is ever whole in memory.

Shapes: T tokens, E hidden size, V vocabulary, K targets a token, R rank, C rows of a chunk.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from backends.lora.adapter import UNEMBED, LoRAPair
from backends.lora.linear import Segment

CHUNK_BYTES = 32 << 20


class _HeadSegment(NamedTuple):
    """Rows start..end whose adapter changes the head."""

    start: int
    end: int
    scale: float


class _Chunk(NamedTuple):
    rows: slice
    parts: list[tuple[int, slice]]
    """(index of the head segment, its rows counted from the chunk's first)"""


def chunk_rows(vocab_size: int) -> int:
    """How many rows of float32 logits fit the CHUNK_BYTES that a chunk may take."""
    return max(1, CHUNK_BYTES // (4 * vocab_size))


def target_logprobs(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    segments: Sequence[Segment],
    chunk: int | None = None,
) -> Tensor:
    """log softmax(W h + scale * B (A h)) at the targets, differentiable in h, A and B.

    Takes hidden[T, E], the frozen weight[V, E], targets int64[T, K] in 0..V-1 (not checked),
    `segments` in row order, and how many rows of logits to hold at once. Gives float32[T, K];
    the logsumexp is float32 whatever the dtype of the model.
    """
    bounds, pairs = _head_segments(segments)
    matrices = [matrix for pair in pairs for matrix in pair]
    return _TargetLogprobs.apply(
        hidden, weight, targets, bounds, chunk or chunk_rows(weight.shape[0]), *matrices
    )


@torch.no_grad()
def logits_rows(hidden: Tensor, weight: Tensor, segments: Sequence[Segment]) -> Tensor:
    """Whole float32[M, V] logits of a few rows hidden[M, E]; `segments` count rows of `hidden`."""
    bounds, pairs = _head_segments(segments)
    parts = [(index, slice(s.start, s.end)) for index, s in enumerate(bounds)]
    logits = hidden.new_empty(len(hidden), len(weight))
    _logits(hidden, weight, parts, bounds, pairs, logits)
    return logits.float()


def _head_segments(
    segments: Sequence[Segment],
) -> tuple[tuple[_HeadSegment, ...], list[LoRAPair]]:
    bounds, pairs = [], []
    for segment in segments:
        if segment.adapter is not None and UNEMBED in segment.adapter.pairs:
            bounds.append(_HeadSegment(segment.start, segment.end, segment.adapter.scale))
            pairs.append(segment.adapter.pairs[UNEMBED])
    return tuple(bounds), pairs


def _pairs(matrices: Sequence[Tensor]) -> list[LoRAPair]:
    return [LoRAPair(a, b) for a, b in zip(matrices[::2], matrices[1::2], strict=True)]


def _chunks(bounds: Sequence[tuple[int, int]], num_rows: int, chunk: int) -> Iterator[_Chunk]:
    """Cut rows 0..num_rows, whatever segments they belong to: the base product of a chunk is one
    matrix product however many adapters share it."""
    for first in range(0, num_rows, chunk):
        last = min(first + chunk, num_rows)
        parts = [
            (index, slice(max(start, first) - first, min(end, last) - first))
            for index, (start, end) in enumerate(bounds)
            if start < last and end > first
        ]
        yield _Chunk(slice(first, last), parts)


def _logits(
    hidden: Tensor,
    weight: Tensor,
    parts: Sequence[tuple[int, slice]],
    bounds: Sequence[_HeadSegment],
    pairs: Sequence[LoRAPair],
    out: Tensor,
) -> list[Tensor]:
    """Write the logits of hidden[C, E] into out[C, V]; gives back A h [., R] of each part."""
    torch.mm(hidden, weight.t(), out=out)
    lows = []
    for index, rows in parts:
        a, b = pairs[index]
        low = hidden[rows] @ a.t().to(hidden.dtype)
        out[rows].addmm_(low, b.t().to(hidden.dtype), alpha=bounds[index].scale)
        lows.append(low)
    return lows


class _Scratch:
    """The one place for the logits of a chunk, used again for each: in the model's dtype, and in
    float32 (the same memory if that is the model's). New arrays would pile up between the
    allocator's holes, and cost a page fault every 4 KiB."""

    def __init__(self, num_rows: int, weight: Tensor) -> None:
        shape = (num_rows, len(weight))
        self.low = weight.new_empty(shape)
        same = weight.dtype == torch.float32
        self.full = self.low if same else weight.new_empty(shape, dtype=torch.float32)

    def to_float32(self, num_rows: int) -> Tensor:
        return self._moved(self.low, self.full, num_rows)

    def to_model_dtype(self, num_rows: int) -> Tensor:
        return self._moved(self.full, self.low, num_rows)

    @staticmethod
    def _moved(source: Tensor, target: Tensor, num_rows: int) -> Tensor:
        return target[:num_rows] if source is target else target[:num_rows].copy_(source[:num_rows])


class _TargetLogprobs(torch.autograd.Function):
    """Keeps the logsumexp of each row and makes the logits a second time in backward."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        targets: Tensor,
        bounds: tuple[_HeadSegment, ...],
        chunk: int,
        *matrices: Tensor,
    ) -> Tensor:
        pairs = _pairs(matrices)
        scratch = _Scratch(min(chunk, len(hidden)), weight)
        out = torch.empty(targets.shape, dtype=torch.float32, device=hidden.device)
        normalizer = torch.empty(len(hidden), 1, dtype=torch.float32, device=hidden.device)
        for rows, parts in _chunks([b[:2] for b in bounds], len(hidden), chunk):
            h = hidden[rows]
            _logits(h, weight, parts, bounds, pairs, scratch.low[: len(h)])
            logits = scratch.to_float32(len(h))
            at_targets = logits.gather(1, targets[rows])
            normalizer[rows] = _logsumexp_(logits)
            out[rows] = at_targets - normalizer[rows]
        ctx.bounds, ctx.chunk = bounds, chunk
        ctx.save_for_backward(hidden, weight, targets, normalizer, *matrices)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        """Rows without a gradient (a prompt's, with weight 0) cost nothing."""
        hidden, weight, targets, normalizer, *matrices = ctx.saved_tensors
        needed = grads[0].ne(0).any(dim=1).nonzero()[:, 0]
        bounds = _bounds_among(needed, ctx.bounds)
        grad_hidden = torch.zeros_like(hidden)
        pairs = _pairs(matrices)
        grad_pairs = _pairs([torch.zeros_like(matrix) for matrix in matrices])
        scratch = _Scratch(min(ctx.chunk, len(needed)), weight)
        for chunk, parts in _chunks(bounds, len(needed), ctx.chunk):
            rows = needed[chunk]
            h = hidden[rows]
            lows = _logits(h, weight, parts, ctx.bounds, pairs, scratch.low[: len(h)])
            logits = scratch.to_float32(len(h))
            _to_grad_(logits, normalizer[rows], targets[rows], grads[0][rows])
            g = scratch.to_model_dtype(len(h))
            gh = g @ weight
            for (index, part), low in zip(parts, lows, strict=True):
                pair, scale = pairs[index], ctx.bounds[index].scale
                grad_low = (g[part] @ pair.b.to(g.dtype)).mul_(scale)
                _accumulate(grad_pairs[index].a, grad_low.t(), h[part])
                _accumulate(grad_pairs[index].b, g[part].t(), low.mul_(scale))
                gh[part].addmm_(grad_low, pair.a.to(g.dtype))
            grad_hidden[rows] = gh
        return (grad_hidden, None, None, None, None, *(m for pair in grad_pairs for m in pair))


def _accumulate(total: Tensor, left: Tensor, right: Tensor) -> None:
    """total += left @ right, without a temporary where the dtypes allow."""
    if total.dtype == left.dtype:
        total.addmm_(left, right)
    else:
        total.add_(left @ right)


def _bounds_among(rows: Tensor, bounds: Sequence[_HeadSegment]) -> list[tuple[int, int]]:
    """Where each segment's rows lie among the sorted `rows`."""
    if not bounds:
        return []
    edges = torch.tensor([b[:2] for b in bounds], device=rows.device)
    return [(start, end) for start, end in torch.searchsorted(rows, edges).tolist()]


def _logsumexp_(logits: Tensor) -> Tensor:
    """logsumexp over the last dim, [C, 1], using up `logits` instead of a copy of it."""
    top = logits.amax(dim=-1, keepdim=True)
    return logits.sub_(top).exp_().sum(dim=-1, keepdim=True).log_().add_(top)


def _to_grad_(logits: Tensor, normalizer: Tensor, targets: Tensor, grad: Tensor) -> None:
    """Turn logits [C, V] into sum over k of grad_k * (one-hot(target_k) - softmax)."""
    total = grad.sum(dim=1, keepdim=True)
    logits.sub_(normalizer).exp_().mul_(total.neg()).scatter_add_(1, targets, grad)
