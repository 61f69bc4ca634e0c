"""A frozen linear layer under many adapters: the base product once over all tokens, the
low-rank products part by part, so ranks and targets are free to differ.

Shapes: T tokens, I in, O out, R rank of the segment's adapter.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from backends.lora.adapter import Adapter, LoRAPair
from backends.lora.gradient import PartGradient
from backends.lora.parts import Bounds, Owner, Part
from backends.lora.product import product

_ALL = slice(None)
_ANCHOR = torch.zeros((), requires_grad=True)
"""Makes autograd record a layer whose input needs no gradient, for the sake of the adapters'
gradients, which it does not see. Never gets one itself."""


@dataclass(frozen=True, slots=True)
class Segment(Part):
    """Tokens start..end of a packed row belong to one adapter (None is the base model)."""

    start: int
    end: int
    adapter: Adapter | None

    @classmethod
    def of(cls, owner: Owner, dtype: torch.dtype) -> Segment:
        """For a model of `dtype`."""
        flat, layout = owner.adapter.flat, owner.adapter.layout
        gradient = PartGradient.empty(layout, 1, flat.device) if owner.backward else None
        return cls(owner.start, owner.end, owner.adapter.to(dtype), gradient=gradient)

    @property
    def scale(self) -> float:
        return self.adapter.scale if self.adapter else 0.0

    @property
    def bounds(self) -> list[Bounds]:
        return [(self.start, self.end)]

    def changes(self, module: str) -> bool:
        return self.adapter is not None and module in self.adapter.pairs

    def cut(self, bounds: Sequence[Bounds]) -> list[Part]:
        [(start, end)] = bounds
        return [replace(self, start=start, end=end)] if start < end else []

    def _pair(self, module: str) -> LoRAPair:
        assert self.adapter is not None
        return self.adapter.pairs[module]

    def _rows(self, tensor: Tensor) -> Tensor:
        return tensor[self.start : self.end]

    def _times(self, rows: Tensor, matrices: Tensor) -> Tensor:
        return rows @ matrices

    def _add_times_(self, into: Tensor, rows: Tensor, matrices: Tensor, scale: float) -> None:
        into.addmm_(rows, matrices, alpha=scale)

    def _outer(self, into: Tensor, left: Tensor, right: Tensor, again: bool) -> None:
        if into.dtype == left.dtype:
            into[0].addmm_(left.mT, right, beta=int(again))
        elif again:
            into[0].add_(left.mT @ right)
        else:
            into[0].copy_(left.mT @ right)


class Segments:
    """Which adapter owns which tokens in the pass under way; one object shared by all layers."""

    def __init__(self) -> None:
        self.current: tuple[Part, ...] = ()

    def parts(self, module: str) -> list[Part]:
        """Those that change `module`, and have a row."""
        return [part for part in self.current if part.changes(module) and not part.empty]


def anchor(parts: Sequence[Part]) -> Tensor | None:
    """What a function over `parts` takes as an input, so that its backward runs if one of them
    wants a gradient."""
    return _ANCHOR if any(part.gradient is not None for part in parts) else None


class Branch(NamedTuple):
    """The low-rank product of a part, and the output columns that it is added to."""

    module: str
    columns: slice
    part: Part


class BranchedLinear(torch.autograd.Function):
    """Saves the input and the [T, R] products only."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        branches: Sequence[Branch],
        anchor: Tensor | None,
    ) -> Tensor:
        y = product(x, weight, bias)
        lows = [b.part.add_product(b.module, x, y[:, b.columns]) for b in branches]
        ctx.branches = branches
        ctx.save_for_backward(x, weight, *lows)
        return y

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (grad_y,) = grads
        x, weight, *lows = ctx.saved_tensors
        grad_x = product(grad_y, weight.t()) if ctx.needs_input_grad[0] else None
        for b, low in zip(ctx.branches, lows, strict=True):
            b.part.add_gradient(b.module, x, grad_y[:, b.columns], low, grad_x)
        return (grad_x, None, None, None, None)


class MultiLoRALinear(nn.Module):
    """Stands where the base model had an `nn.Linear`."""

    def __init__(self, name: str, base: nn.Linear, segments: Segments) -> None:
        super().__init__()
        self.name = name
        self.base = base
        self.segments = segments

    def forward(self, x: Tensor) -> Tensor:
        """x[1, T, I] -> [1, T, O]"""
        parts = self.segments.parts(self.name)
        branches = [Branch(self.name, _ALL, part) for part in parts]
        y = BranchedLinear.apply(x[0], self.base.weight, self.base.bias, branches, anchor(parts))
        return y[None]
