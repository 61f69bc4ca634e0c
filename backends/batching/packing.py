"""Which datums go through the model together: pure arithmetic on their lengths."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import NamedTuple


class Piece(NamedTuple):
    """Datum number `datum` of request number `request`."""

    request: int
    datum: int
    num_tokens: int


class Span(NamedTuple):
    """Where the datums of one request lie in a packed row."""

    request: int
    start: int
    end: int


@dataclass(frozen=True, slots=True)
class Microbatch:
    """Datums for one pass through the model, in the order of their requests."""

    backward: bool
    pieces: tuple[Piece, ...]

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
        return Microbatch(
            self.backward, tuple(piece for piece in self.pieces if piece.request not in requests)
        )

    def split(self) -> list[Microbatch]:
        """Smaller ones for when memory ran out: by request, else by datum; [] if it is one
        datum."""
        if len(self.pieces) <= 1:
            return []
        several = self.pieces[0].request != self.pieces[-1].request
        groups = groupby(self.pieces, key=lambda p: p.request if several else p.datum)
        return [Microbatch(self.backward, tuple(pieces)) for _, pieces in groups]


def pack(
    lengths: Sequence[Sequence[int]], backward: Sequence[bool], max_tokens: int
) -> list[Microbatch]:
    """Cut requests, given by the lengths of their datums in tokens, into microbatches.

    None has more than `max_tokens`, but for a longer datum, which goes alone. A microbatch needs
    gradients or it does not, so that a forward never pays for activations; those that need
    them come first. Datums keep their order, and those of one request lie next to each other.
    """
    return [
        Microbatch(mode, pieces)
        for mode in (True, False)
        for pieces in _fill(_pieces(lengths, backward, mode), max_tokens)
    ]


def _pieces(
    lengths: Sequence[Sequence[int]], backward: Sequence[bool], mode: bool
) -> Iterator[Piece]:
    for request, (datums, wanted) in enumerate(zip(lengths, backward, strict=True)):
        if wanted == mode:
            yield from (Piece(request, i, length) for i, length in enumerate(datums))


def _fill(pieces: Iterator[Piece], max_tokens: int) -> Iterator[tuple[Piece, ...]]:
    chosen: list[Piece] = []
    used = 0
    for piece in pieces:
        if chosen and used + piece.num_tokens > max_tokens:
            yield tuple(chosen)
            chosen, used = [], 0
        chosen.append(piece)
        used += piece.num_tokens
    if chosen:
        yield tuple(chosen)
