"""Which datums go through the model together: pure arithmetic on their lengths."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import NamedTuple

SHARED_FORWARD_TOKENS = {"cpu": 12, "cuda": 256}
"""How many forward-only tokens are worth a backward they do not need, by type of device: their
part of it, over what a pass costs however few tokens it has, which is reading the weights. See
backends/README.md for the measurement on a CPU; that of a GPU is computed, not measured."""


class Piece(NamedTuple):
    """Datum number `datum` of request number `request`."""

    request: int
    datum: int
    num_tokens: int
    backward: bool
    """Whether its request wants gradients."""


class Span(NamedTuple):
    """Where the datums of one request lie in a packed row."""

    request: int
    start: int
    end: int


@dataclass(frozen=True, slots=True)
class Microbatch:
    """Datums for one pass through the model, in the order of their requests."""

    pieces: tuple[Piece, ...]

    @property
    def backward(self) -> bool:
        """Whether any of them needs gradients."""
        return any(piece.backward for piece in self.pieces)

    @property
    def num_tokens(self) -> int:
        return sum(piece.num_tokens for piece in self.pieces)

    @property
    def spans(self) -> list[Span]:
        spans, start = [], 0
        for request, pieces in groupby(self.pieces, key=lambda piece: piece.request):
            end = start + sum(piece.num_tokens for piece in pieces)
            spans.append(Span(request, start, end))
            start = end
        return spans

    def without(self, requests: set[int]) -> Microbatch:
        return Microbatch(tuple(piece for piece in self.pieces if piece.request not in requests))

    def split(self) -> list[Microbatch]:
        """Smaller ones for when memory ran out: by request, else by datum; [] if it is one
        datum."""
        if len(self.pieces) <= 1:
            return []
        several = self.pieces[0].request != self.pieces[-1].request
        groups = groupby(self.pieces, key=lambda p: p.request if several else p.datum)
        return [Microbatch(tuple(pieces)) for _, pieces in groups]


def pack(
    lengths: Sequence[Sequence[int]],
    backward: Sequence[bool],
    max_tokens: int,
    shared_forward_tokens: int,
) -> list[Microbatch]:
    """Cut requests, given by the lengths of their datums in tokens, into microbatches.

    None has more than `max_tokens`, but for a longer datum, which goes alone. Datums keep their
    order, and those of one request lie next to each other. What only goes forward stays apart
    from what needs gradients, so that it pays for neither activations nor a backward; unless
    all that is left of it are `shared_forward_tokens` or fewer, and a microbatch that needs
    gradients has room: a pass of their own would cost more.
    """
    pieces = list(pieces_of(lengths, backward))
    need_gradients = _fill((p for p in pieces if p.backward), max_tokens)
    forward_only = _fill((p for p in pieces if not p.backward), max_tokens)
    if need_gradients and forward_only:
        first, second = need_gradients[-1], forward_only[-1]
        shared = Microbatch(tuple(sorted(first.pieces + second.pieces)))
        if second.num_tokens <= shared_forward_tokens and shared.num_tokens <= max_tokens:
            return [*need_gradients[:-1], *forward_only[:-1], shared]
    return need_gradients + forward_only


def pieces_of(lengths: Sequence[Sequence[int]], backward: Sequence[bool]) -> Iterator[Piece]:
    """Of requests in their order, given by the lengths of their datums."""
    for request, (datums, wanted) in enumerate(zip(lengths, backward, strict=True)):
        yield from (Piece(request, i, length, wanted) for i, length in enumerate(datums))


def _fill(pieces: Iterable[Piece], max_tokens: int) -> list[Microbatch]:
    filled: list[Microbatch] = []
    chosen: list[Piece] = []
    used = 0
    for piece in pieces:
        if chosen and used + piece.num_tokens > max_tokens:
            filled.append(Microbatch(tuple(chosen)))
            chosen, used = [], 0
        chosen.append(piece)
        used += piece.num_tokens
    return [*filled, Microbatch(tuple(chosen))] if chosen else filled
