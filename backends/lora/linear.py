"""A frozen linear layer under many adapters: the base product once over all tokens, the
low-rank products segment by segment, so ranks and targets are free to differ.

Shapes: T tokens, I in, O out, R rank of the segment's adapter.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from backends.lora.adapter import Adapter, LoRAPair


@dataclass(frozen=True, slots=True)
class Segment:
    """Tokens start..end of a packed row belong to one adapter (None is the base model)."""

    start: int
    end: int
    adapter: Adapter | None


class Segments:
    """Which adapter owns which tokens in the pass under way; one object shared by all layers."""

    def __init__(self) -> None:
        self.current: tuple[Segment, ...] = ()

    def pairs(self, module: str) -> list[tuple[int, int, float, LoRAPair]]:
        """(start, end, scale, pair) of the segments whose adapter changes `module`."""
        return [
            (s.start, s.end, s.adapter.scale, s.adapter.pairs[module])
            for s in self.current
            if s.adapter is not None and module in s.adapter.pairs
        ]


class _SegmentedLinear(torch.autograd.Function):
    """Adds each segment's product into the base output in place, so no [T, O] temporary is
    made; saves the input and the [T, R] product only."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        bounds: Sequence[tuple[int, int, float]],
        *matrices: Tensor,
    ) -> Tensor:
        y = F.linear(x, weight, bias)
        low = []
        for (start, end, scale), a, b in zip(bounds, matrices[::2], matrices[1::2], strict=True):
            h = x[start:end] @ a.t().to(x.dtype)
            y[start:end].addmm_(h, b.t().to(x.dtype), alpha=scale)
            low.append(h)
        ctx.bounds = bounds
        ctx.num_segments = len(bounds)
        ctx.save_for_backward(x, weight, *low, *matrices)
        return y

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (gy,) = grads
        x, weight, *rest = ctx.saved_tensors
        low, matrices = rest[: ctx.num_segments], rest[ctx.num_segments :]
        gx = gy @ weight if ctx.needs_input_grad[0] else None
        out: list[Tensor | None] = []
        for (start, end, scale), h, a, b in zip(
            ctx.bounds, low, matrices[::2], matrices[1::2], strict=True
        ):
            g = gy[start:end]
            gh = (g @ b.to(g.dtype)).mul_(scale)
            out.append((gh.t() @ x[start:end]).to(a.dtype))
            out.append((g.t() @ (h * scale)).to(b.dtype))
            if gx is not None:
                gx[start:end].addmm_(gh, a.to(gh.dtype))
        return (gx, None, None, None, *out)


class MultiLoRALinear(nn.Module):
    """Stands where the base model had an `nn.Linear`."""

    def __init__(self, name: str, base: nn.Linear, segments: Segments) -> None:
        super().__init__()
        self.name = name
        self.base = base
        self.segments = segments

    def forward(self, x: Tensor) -> Tensor:
        """x[1, T, I] -> [1, T, O]"""
        parts = self.segments.pairs(self.name)
        if not parts:
            return self.base(x)
        bounds = [(start, end, scale) for start, end, scale, _ in parts]
        matrices = [matrix for *_, pair in parts for matrix in pair]
        y = _SegmentedLinear.apply(x[0], self.base.weight, self.base.bias, bounds, *matrices)
        return y[None]
