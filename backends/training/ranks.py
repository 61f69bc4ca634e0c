"""The processes that hold one trainer together, as each of them sees the others.

Shapes: P numbers of a whole adapter, p of the part that one process has.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol, TypeVar

from torch import Tensor

from backends.lora.adapter import Layout
from backends.optimizers.norms import norms

Value = TypeVar("Value")


class Part(NamedTuple):
    """What one rank has of a vector in the layout of an adapter."""

    whole: Layout
    """Of the adapter."""
    flat: Tensor
    """[p]"""


class Ranks(Protocol):
    """Every call but `local` and `cut` is made by all ranks, in the same order."""

    @property
    def leads(self) -> bool:
        """Whether it is this one that answers, and that writes files."""
        ...

    def local(self, whole: Layout) -> Layout:
        """Of the part that this rank has of an adapter."""
        ...

    def cut(self, whole: Layout, flat: Tensor) -> Tensor:
        """This rank's part [p] of a vector [P]."""
        ...

    def join(self, part: Part) -> Tensor | None:
        """The vector [P] again where this one leads, else None."""
        ...

    def add_up(self, parts: Sequence[Part]) -> list[Part]:
        """Gradients float32[p], each summed exactly once over the ranks that found something of
        it. Takes the vectors over."""
        ...

    def norms(self, parts: Sequence[Part]) -> list[float]:
        """L2 norms of whole vectors float32[P], the same on all ranks."""
        ...

    def exchange(self, value: Value) -> list[Value]:
        """The values of all ranks, by rank."""
        ...


class Alone:
    """One process: it has everything, and nobody to ask."""

    leads = True

    def local(self, whole: Layout) -> Layout:
        return whole

    def cut(self, whole: Layout, flat: Tensor) -> Tensor:
        return flat

    def join(self, part: Part) -> Tensor:
        return part.flat

    def add_up(self, parts: Sequence[Part]) -> list[Part]:
        return list(parts)

    def norms(self, parts: Sequence[Part]) -> list[float]:
        return norms([part.flat for part in parts])

    def exchange(self, value: Value) -> list[Value]:
        return [value]
