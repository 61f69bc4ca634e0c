"""Which numbers of an adapter which rank has: pure arithmetic.

An adapter is one vector, matrix after matrix; so is the part of it on one rank, with the matrices
of the layers that are there, each cut as the base model's layer is. Ranks may have the same
numbers, and then hold the same values.

Shapes: I in, O out, R rank of the adapter, P numbers of a whole one, p of a rank's part.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache
from itertools import groupby
from typing import NamedTuple

import torch
from torch import Tensor

from backends.lora.adapter import Layout
from backends.lora.parts import Bounds


class Share(NamedTuple):
    """What a rank has of a targeted layer: these columns of A[R, I] and these rows of B[O, R]."""

    inputs: Bounds
    outputs: Bounds


class Cut(NamedTuple):
    """Numbers start..end of a rank's part, and the ranks that have the same."""

    start: int
    end: int
    holders: tuple[int, ...]


class Shares:
    """Of all ranks, as one of them sees it."""

    def __init__(self, of_ranks: Sequence[Mapping[str, Share]], rank: int) -> None:
        """`of_ranks`: by rank, by the names of the layers that are there."""
        self._of_ranks = of_ranks
        self._rank = rank
        self._inputs = _holders(of_ranks, lambda share: share.inputs)
        self._outputs = _holders(of_ranks, lambda share: share.outputs)
        # Layouts are few, and compared by what is in them once only.
        self.local = cache(self._local)
        self.cuts = cache(self._cuts)

    @property
    def holders(self) -> list[tuple[int, ...]]:
        """All groups of ranks that have some numbers in common, in the same order everywhere."""
        return sorted({*self._inputs.values(), *self._outputs.values()})

    @property
    def senders(self) -> list[int]:
        """Ranks that together have everything."""
        return sorted({holders[0] for holders in self.holders})

    def cut(self, whole: Layout, flat: Tensor) -> Tensor:
        """This rank's part [p] of flat[P], in memory of its own."""
        part = flat.new_empty(self.local(whole, self._rank).num_elements)
        for large, small in self._pairs(whole, flat, part, self._rank):
            small.copy_(large)
        return part

    def join(self, whole: Layout, parts: Mapping[int, Tensor]) -> Tensor:
        """[P] again, on the CPU, from the parts of the `senders`."""
        flat = torch.empty(whole.num_elements)
        for rank, part in parts.items():
            for large, small in self._pairs(whole, flat, part, rank):
                large.copy_(small)
        return flat

    def _pairs(
        self, whole: Layout, flat: Tensor, part: Tensor, rank: int
    ) -> Iterator[tuple[Tensor, Tensor]]:
        """Views of both on each matrix that the rank has something of."""
        local = self.local(whole, rank)
        for name in local.names:
            share = self._of_ranks[rank][name]
            large, small = whole.pair(flat, name), local.pair(part, name)
            yield large.a[:, slice(*share.inputs)], small.a
            yield large.b[slice(*share.outputs)], small.b

    def _local(self, whole: Layout, rank: int) -> Layout:
        """Of a rank's part."""
        shares = self._of_ranks[rank]
        modules = [
            (name, _length(shares[name].inputs), _length(shares[name].outputs))
            for name, _, _ in whole.modules
            if name in shares
        ]
        return Layout.of(whole.rank, tuple(modules))

    def _cuts(self, whole: Layout) -> list[Cut]:
        """Of this rank's part, end to end."""
        cuts, start = [], 0
        for holders, sizes in groupby(self._matrices(whole), key=lambda matrix: matrix[0]):
            end = start + sum(size for _, size in sizes)
            cuts.append(Cut(start, end, holders))
            start = end
        return cuts

    def _matrices(self, whole: Layout) -> Iterator[tuple[tuple[int, ...], int]]:
        """The holders and the size of each A and B of this rank's part."""
        for name, num_in, num_out in self.local(whole, self._rank).modules:
            share = self._of_ranks[self._rank][name]
            yield self._inputs[name, share.inputs], whole.rank * num_in
            yield self._outputs[name, share.outputs], whole.rank * num_out


def _holders(
    of_ranks: Sequence[Mapping[str, Share]], bounds: Callable[[Share], Bounds]
) -> dict[tuple[str, Bounds], tuple[int, ...]]:
    """Which ranks have which of the pieces that `bounds` cuts."""
    found: dict[tuple[str, Bounds], list[int]] = defaultdict(list)
    for rank, shares in enumerate(of_ranks):
        for name, share in shares.items():
            found[name, bounds(share)].append(rank)
    return {piece: tuple(ranks) for piece, ranks in found.items()}


def _length(bounds: Bounds) -> int:
    return bounds[1] - bounds[0]
