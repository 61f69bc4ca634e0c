"""The gradient of one microbatch for the adapters of one part.

Shapes: n adapters, P numbers of an adapter.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from backends.lora.adapter import Layout, LoRAPair


@dataclass(frozen=True, slots=True)
class PartGradient:
    """float32[n, P] that starts unwritten: the first product for a module overwrites what is
    there, which costs one pass over the memory less than to add it to zeros."""

    layout: Layout
    flat: Tensor
    _written: set[str] = field(default_factory=set)

    @classmethod
    def empty(cls, layout: Layout, num_adapters: int, device: torch.device) -> PartGradient:
        return cls(layout, torch.empty(num_adapters, layout.num_elements, device=device))

    def place(self, module: str) -> tuple[LoRAPair, bool]:
        """Where the module's gradient goes, and whether there is something to add it to."""
        again = module in self._written
        self._written.add(module)
        return self.layout.pair(self.flat, module), again

    def clear(self, module: str) -> None:
        """Zeros, for who brings the gradient in pieces: a few rows or adapters at a time."""
        pair, _ = self.place(module)
        for matrix in pair:
            matrix.zero_()

    def rows(self, first: int, last: int) -> PartGradient:
        """Of adapters first..last alone; what is written there is written here. For modules that
        were cleared before."""
        return PartGradient(self.layout, self.flat[first:last], self._written)

    def take(self) -> list[Tensor]:
        """float32[P] of each adapter, zero where nothing came, in memory of its own."""
        for module in self.layout.names:
            if module not in self._written:
                self.clear(module)
        if len(self.flat) == 1:
            return [self.flat[0]]
        return [row.clone() for row in self.flat]
