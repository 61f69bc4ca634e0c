"""The frozen unembedding in chunks: no [T, V] array is ever whole in memory.

Shapes: T tokens, E hidden size, V vocabulary, K targets a token, R rank, C rows of a chunk.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from backends.lora.adapter import UNEMBED
from backends.lora.linear import anchor
from backends.lora.parts import Bounds, Part
from backends.lora.product import product
from backends.lora.vocabulary import VocabularyShard, WholeVocabulary, own_targets

CHUNK_BYTES = 32 << 20


class _Chunk(NamedTuple):
    rows: slice
    parts: list[Part]
    """Their rows are counted from the chunk's first."""


def chunk_rows(vocab_size: int) -> int:
    """How many rows of float32 logits fit the CHUNK_BYTES that a chunk may take."""
    return max(1, CHUNK_BYTES // (4 * vocab_size))


def target_logprobs(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    parts: Sequence[Part],
    chunk: int | None = None,
    vocabulary: VocabularyShard | None = None,
) -> Tensor:
    """log softmax(W h + scale * B (A h)) at the targets, differentiable in h; the gradients of A
    and B go where the parts say.

    Takes hidden[T, E], the frozen weight[V, E], targets int64[T, K] in 0..V-1 (not checked),
    `parts` in row order, and how many rows of logits to hold at once. Gives float32[T, K];
    the logsumexp is float32 whatever the dtype of the model.

    With a `vocabulary` the weight and the parts' B are those of its tokens alone. All processes
    then get the same result, and each its own summand of the gradients of h and of A.
    """
    heads = _that_change_the_head(parts)
    rows = chunk or chunk_rows(weight.shape[0])
    vocabulary = vocabulary or WholeVocabulary()
    return _TargetLogprobs.apply(hidden, weight, targets, heads, rows, vocabulary, anchor(heads))


@torch.no_grad()
def logits_rows(hidden: Tensor, weight: Tensor, parts: Sequence[Part]) -> Tensor:
    """Whole float32[M, V] logits of a few rows hidden[M, E]; `parts` count rows of `hidden`."""
    logits = product(hidden, weight)
    for part in _that_change_the_head(parts):
        part.add_product(UNEMBED, hidden, logits)
    return logits.float()


def _that_change_the_head(parts: Sequence[Part]) -> list[Part]:
    return [part for part in parts if part.changes(UNEMBED)]


def _chunks(
    parts: Sequence[Part], bounds: Sequence[Sequence[Bounds]], num_rows: int, chunk: int
) -> Iterator[_Chunk]:
    """Cut rows 0..num_rows, whatever parts they belong to: the base product of a chunk is one
    matrix product however many adapters share it. `bounds` are those of each part."""
    for first in range(0, num_rows, chunk):
        last = min(first + chunk, num_rows)
        inside = [
            small
            for part, edges in zip(parts, bounds, strict=True)
            if edges[0][0] < last and edges[-1][1] > first
            for small in part.cut([_within(edge, first, last) for edge in edges])
        ]
        yield _Chunk(slice(first, last), inside)


def _within(bounds: Bounds, first: int, last: int) -> Bounds:
    """What lies in first..last of it, counted from first; nothing is an end at its start."""
    start, end = (min(max(edge, first), last) - first for edge in bounds)
    return start, end


def _logits(hidden: Tensor, weight: Tensor, parts: Sequence[Part], out: Tensor) -> list[Tensor]:
    """Write the logits of hidden[C, E] into out[C, V]; gives back A h of each part."""
    # Copied, though that is work: without the one place for all chunks the peak was twice as high.
    out.copy_(product(hidden, weight))
    return [part.add_product(UNEMBED, hidden, out) for part in parts]


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
        parts: Sequence[Part],
        chunk: int,
        vocabulary: VocabularyShard,
        anchor: Tensor | None,
    ) -> Tensor:
        scratch = _Scratch(min(chunk, len(hidden)), weight)
        at_targets = torch.empty(targets.shape, dtype=torch.float32, device=hidden.device)
        own = torch.empty(len(hidden), 1, dtype=torch.float32, device=hidden.device)
        targets, here = own_targets(targets, vocabulary.first, len(weight))
        bounds = [part.bounds for part in parts]
        for rows, inside in _chunks(parts, bounds, len(hidden), chunk):
            h = hidden[rows]
            _logits(h, weight, inside, scratch.low[: len(h)])
            logits = scratch.to_float32(len(h))
            at_targets[rows] = logits.gather(1, targets[rows])
            own[rows] = _logsumexp_(logits)
        at_targets.masked_fill_(~here, 0.0)
        normalizer = vocabulary.log_sum_exp(own)
        ctx.parts, ctx.chunk = parts, chunk
        ctx.save_for_backward(hidden, weight, targets, here, normalizer)
        return vocabulary.add_up(at_targets).sub_(normalizer)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        """Rows without a gradient (a prompt's, with weight 0) cost nothing."""
        hidden, weight, targets, here, normalizer = ctx.saved_tensors
        for part in ctx.parts:
            if part.gradient is not None:
                part.gradient.clear(UNEMBED)
        needed = grads[0].ne(0).any(dim=1).nonzero()[:, 0]
        bounds = _bounds_among(needed, ctx.parts)
        grad_hidden = torch.zeros_like(hidden)
        scratch = _Scratch(min(ctx.chunk, len(needed)), weight)
        for chunk, inside in _chunks(ctx.parts, bounds, len(needed), ctx.chunk):
            rows = needed[chunk]
            h = hidden[rows]
            lows = _logits(h, weight, inside, scratch.low[: len(h)])
            logits = scratch.to_float32(len(h))
            _to_grad_(logits, normalizer[rows], targets[rows], here[rows], grads[0][rows])
            g = scratch.to_model_dtype(len(h))
            gh = product(g, weight.t())
            for part, low in zip(inside, lows, strict=True):
                part.add_gradient(UNEMBED, h, g, low, gh)
            grad_hidden[rows] = gh
        return (grad_hidden, None, None, None, None, None, None)


def _bounds_among(rows: Tensor, parts: Sequence[Part]) -> list[list[Bounds]]:
    """Where the rows of each part's adapters lie among the sorted `rows`."""
    bounds = [part.bounds for part in parts]
    flat = [edges for of_part in bounds for edges in of_part]
    if not flat:
        return []
    edges = torch.tensor(flat, device=rows.device)
    found = iter(torch.searchsorted(rows, edges).tolist())
    return [[tuple(next(found)) for _ in of_part] for of_part in bounds]


def _logsumexp_(logits: Tensor) -> Tensor:
    """logsumexp over the last dim, [C, 1], using up `logits` instead of a copy of it."""
    top = logits.amax(dim=-1, keepdim=True)
    return logits.sub_(top).exp_().sum(dim=-1, keepdim=True).log_().add_(top)


def _to_grad_(
    logits: Tensor, normalizer: Tensor, targets: Tensor, here: Tensor, grad: Tensor
) -> None:
    """Turn logits [C, V] into sum over k of grad_k * (one-hot(target_k) - softmax); targets that
    are not `here` have no one in their one-hot."""
    total = grad.sum(dim=1, keepdim=True)
    own = grad.masked_fill(~here, 0.0)
    logits.sub_(normalizer).exp_().mul_(total.neg()).scatter_add_(1, targets, own)
