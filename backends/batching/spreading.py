"""Which datums go through the model on which rank: pure arithmetic on their lengths."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import accumulate
from typing import NamedTuple

from backends.batching.packing import Microbatch, Piece, pieces_of


class Round(NamedTuple):
    """What all ranks do at the same time: a microbatch each, of about as many tokens; those of
    some may be empty."""

    microbatches: tuple[Microbatch, ...]
    """By rank."""
    backward: bool
    """Whether any of them needs gradients: then all ranks go back through the layers."""


def spread(
    lengths: Sequence[Sequence[int]],
    backward: Sequence[bool],
    max_tokens: int,
    shared_forward_tokens: int,
    num_ranks: int,
) -> list[Round]:
    """Cut requests, given by the lengths of their datums in tokens, into rounds of microbatches.

    None has more than `max_tokens`, but for a longer datum, which goes alone. Datums keep their
    order. What only goes forward has rounds of its own, unless it is `shared_forward_tokens` or
    fewer for each rank and there is something that needs gradients (see `packing.pack`).
    """
    pieces = list(pieces_of(lengths, backward))
    need_gradients = [piece for piece in pieces if piece.backward]
    forward_only = [piece for piece in pieces if not piece.backward]
    shared = sum(piece.num_tokens for piece in forward_only) <= num_ranks * shared_forward_tokens
    if need_gradients and shared:
        need_gradients, forward_only = pieces, []
    return [
        *_rounds(_cut(need_gradients, max_tokens, num_ranks), num_ranks, backward=True),
        *_rounds(_cut(forward_only, max_tokens, num_ranks), num_ranks, backward=False),
    ]


def _rounds(
    microbatches: Sequence[Microbatch], num_ranks: int, *, backward: bool
) -> Iterator[Round]:
    for first in range(0, len(microbatches), num_ranks):
        of_ranks = microbatches[first : first + num_ranks]
        if any(microbatch.pieces for microbatch in of_ranks):
            yield Round(tuple(of_ranks), backward)


def _cut(pieces: Sequence[Piece], max_tokens: int, num_ranks: int) -> list[Microbatch]:
    """A multiple of `num_ranks` microbatches, as few as possible."""
    if not pieces:
        return []
    total = sum(piece.num_tokens for piece in pieces)
    number = num_ranks * -(-total // (num_ranks * max_tokens))
    while True:
        microbatches = _even(pieces, number, total)
        if all(m.num_tokens <= max_tokens or len(m.pieces) == 1 for m in microbatches):
            return microbatches
        number += num_ranks


def _even(pieces: Sequence[Piece], number: int, total: int) -> list[Microbatch]:
    """Each piece goes to the microbatch that its middle falls into, where all together lie on a
    line of `total` tokens and have equal shares of it."""
    chosen: list[list[Piece]] = [[] for _ in range(number)]
    starts = accumulate((piece.num_tokens for piece in pieces), initial=0)
    for piece, start in zip(pieces, starts, strict=False):
        middle = 2 * start + piece.num_tokens
        chosen[middle * number // (2 * total)].append(piece)
    return [Microbatch(tuple(some)) for some in chosen]
