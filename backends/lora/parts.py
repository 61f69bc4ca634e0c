"""What the layers ask of an adapter's tokens: its low-rank products, there and back.

Shapes: T tokens of the packed row, I in, O out, R rank, n adapters of a part, L tokens of each,
P numbers of an adapter.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor

from backends.lora.adapter import Adapter, LoRAPair
from backends.lora.gradient import PartGradient

Bounds = tuple[int, int]
"""Rows start..end."""


class Owner(NamedTuple):
    """Whose are rows start..end of a packed row, and whether a gradient is wanted of them."""

    start: int
    end: int
    adapter: Adapter
    backward: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Part(ABC):
    """Neighbouring rows of a packed row whose low-rank products are made together.

    The products are written into what the layer has made for all tokens, so there is no [T, O]
    temporary, and the gradients of A and B into `gradient`, never returned to autograd.
    """

    gradient: PartGradient | None = None
    """None where only the forward is wanted."""

    @property
    @abstractmethod
    def scale(self) -> float: ...

    @property
    @abstractmethod
    def bounds(self) -> Sequence[Bounds]:
        """The rows of each of its adapters."""

    @property
    def empty(self) -> bool:
        """Whether none of its adapters has a row."""
        bounds = self.bounds
        return bounds[0][0] == bounds[-1][1]

    @abstractmethod
    def changes(self, module: str) -> bool: ...

    def take_gradients(self) -> Sequence[Tensor | None]:
        """float32[P] of each of its adapters, each in memory of its own."""
        return [None] * len(self.bounds) if self.gradient is None else self.gradient.take()

    @abstractmethod
    def cut(self, bounds: Sequence[Bounds]) -> list[Part]:
        """The same with other rows for each of its adapters, some or all of which may have
        none. They must lie in order, but not end to end."""

    def add_product(self, module: str, x: Tensor, y: Tensor) -> Tensor:
        """Add scale * B (A x) to its rows of y[T, O]; gives back A x, which the backward wants
        again."""
        a, b = self._pair(module)
        low = self._times(self._rows(x), a.to(x.dtype).mT)
        self._add_times_(self._rows(y), low, b.to(x.dtype).mT, self.scale)
        return low

    def add_gradient(
        self, module: str, x: Tensor, grad_y: Tensor, low: Tensor, grad_x: Tensor | None
    ) -> None:
        """Add the gradient of A and B to `gradient`, that of x to its rows of grad_x[T, I]. A
        part without a gradient has no loss, so that its rows of grad_y are zero."""
        if self.gradient is None:
            return
        a, b = self._pair(module)
        g, scale = self._rows(grad_y), self.scale
        grad_low = self._times(g, b.to(g.dtype))
        if scale != 1:
            grad_low, low = grad_low.mul_(scale), low * scale
        if grad_x is not None:
            self._add_times_(self._rows(grad_x), grad_low, a.to(g.dtype), 1.0)
        into, again = self.gradient.place(module)
        self._outer(into.a, grad_low, self._rows(x), again)
        self._outer(into.b.mT, low, g, again)

    @abstractmethod
    def _pair(self, module: str) -> LoRAPair: ...

    @abstractmethod
    def _rows(self, tensor: Tensor) -> Tensor:
        """Its rows of tensor[T, I], in the shape that the products below work on."""

    @abstractmethod
    def _times(self, rows: Tensor, matrices: Tensor) -> Tensor:
        """Each adapter's rows times its matrix."""

    @abstractmethod
    def _add_times_(self, into: Tensor, rows: Tensor, matrices: Tensor, scale: float) -> None:
        """Add `scale` times that."""

    @abstractmethod
    def _outer(self, into: Tensor, left: Tensor, right: Tensor, again: bool) -> None:
        """Each adapter's left^T right: added to `into` if `again`, else written over it."""
