"""The low-rank products of several adapters by one call.

Shapes: n adapters of a group, L tokens of each, R rank, I in, O out, P numbers of an adapter.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate
from typing import Self

import torch
import torch.nn.functional as F
from torch import Tensor

from backends.lora.adapter import Adapter, Layout, LoRAPair
from backends.lora.gradient import PartGradient
from backends.lora.parts import Bounds, Owner, Part


@dataclass(frozen=True, slots=True)
class Group(Part):
    """Rows that lie end to end, of adapters with one layout and one scale. None is without a row,
    or all are."""

    rows: tuple[Bounds, ...]
    """Of each adapter."""
    stack: Adapter
    """Of all of them, in the model's dtype."""

    @classmethod
    def of(cls, owners: Sequence[Owner], dtype: torch.dtype) -> Self:
        """All with one layout, scale and wish for a gradient."""
        spec, layout = owners[0].adapter.spec, owners[0].adapter.layout
        flat = torch.stack([owner.adapter.flat for owner in owners]).to(dtype)
        wanted = owners[0].backward
        gradient = PartGradient.empty(layout, len(owners), flat.device) if wanted else None
        rows = tuple((owner.start, owner.end) for owner in owners)
        return cls(rows, Adapter(spec, layout, flat), gradient=gradient)

    @property
    def scale(self) -> float:
        return self.stack.scale

    @property
    def bounds(self) -> Sequence[Bounds]:
        return self.rows

    def changes(self, module: str) -> bool:
        return module in self.stack.layout.names

    def cut(self, bounds: Sequence[Bounds]) -> list[Part]:
        return [
            type(self)(
                tuple(bounds[first:last]),
                replace(self.stack, flat=self.stack.flat[first:last]),
                gradient=self.gradient and self.gradient.rows(first, last),
            )
            for first, last in self._neighbours(bounds)
        ]

    @staticmethod
    @abstractmethod
    def _neighbours(bounds: Sequence[Bounds]) -> Iterator[tuple[int, int]]:
        """Index ranges first..last of what can be one group; those without a row are in none."""

    def _pair(self, module: str) -> LoRAPair:
        # Not its `pairs`, which are those of all modules: a cut is often for one of them.
        return self.stack.layout.pair(self.stack.flat, module)

    def _rows(self, tensor: Tensor) -> Tensor:
        return tensor[self.rows[0][0] : self.rows[-1][1]]

    def _outer(self, into: Tensor, left: Tensor, right: Tensor, again: bool) -> None:
        product = self._times(left.mT, right)
        if again:
            into.add_(product)
        else:
            into.copy_(product)


@dataclass(frozen=True, slots=True)
class EqualGroup(Group):
    """As many rows of each adapter: batched products."""

    @staticmethod
    def _neighbours(bounds: Sequence[Bounds]) -> Iterator[tuple[int, int]]:
        return neighbours(bounds, equal=True)

    def _rows(self, tensor: Tensor) -> Tensor:
        """[n * L, I] -> [n, L, I]"""
        start, end = self.rows[0]
        return tensor[start : self.rows[-1][1]].view(len(self.rows), end - start, -1)

    def _times(self, rows: Tensor, matrices: Tensor) -> Tensor:
        return torch.bmm(rows, matrices)

    def _add_times_(self, into: Tensor, rows: Tensor, matrices: Tensor, scale: float) -> None:
        into.baddbmm_(rows, matrices, alpha=scale)


@dataclass(frozen=True, slots=True)
class RaggedGroup(Group):
    """Any number of rows of each adapter: grouped products, which have a kernel on accelerators.
    Only for shapes that `grouped_mm_takes`."""

    ends: Tensor = field(init=False)
    """int32[n], where each adapter's rows end, counted from the group's first."""

    def __post_init__(self) -> None:
        lengths = accumulate(end - start for start, end in self.rows)
        ends = torch.tensor(list(lengths), dtype=torch.int32, device=self.stack.flat.device)
        object.__setattr__(self, "ends", ends)

    @staticmethod
    def _neighbours(bounds: Sequence[Bounds]) -> Iterator[tuple[int, int]]:
        return neighbours(bounds, equal=False)

    def _times(self, rows: Tensor, matrices: Tensor) -> Tensor:
        return F.grouped_mm(rows, matrices, offs=self.ends)

    def _add_times_(self, into: Tensor, rows: Tensor, matrices: Tensor, scale: float) -> None:
        into.add_(self._times(rows, matrices), alpha=scale)


def grouped_mm_takes(layout: Layout, dtype: torch.dtype) -> bool:
    """The kernel wants the rows of every matrix to begin at multiples of 16 bytes."""
    sizes = {layout.rank, *(size for _, *sizes in layout.modules for size in sizes)}
    return all(size * dtype.itemsize % 16 == 0 for size in sizes)


def neighbours(bounds: Sequence[Bounds], *, equal: bool) -> Iterator[tuple[int, int]]:
    """Index ranges first..last of bounds that lie end to end and are not empty; of one length if
    `equal`."""
    first = 0
    for last in range(1, len(bounds) + 1):
        if last < len(bounds) and _goes_on(bounds[last - 1], bounds[last], equal):
            continue
        if bounds[first][0] < bounds[first][1]:
            yield first, last
        first = last


def _goes_on(left: Bounds, right: Bounds, equal: bool) -> bool:
    lengths = left[1] - left[0], right[1] - right[0]
    return left[1] == right[0] and (lengths[0] == lengths[1] if equal else all(lengths))
