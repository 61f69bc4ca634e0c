"""AdamW for many runs in one call: torch's own, each with hyperparameters of its own that may
change at every step.

Shapes: P numbers of an adapter.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import groupby
from pathlib import Path
from typing import NamedTuple

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor
from torch.optim.adamw import adamw

from backends.contract import Failure, OptimStep
from backends.lora.adapter import Layout

_LARGEST_NORM = 1e18
"""AdamW squares the gradient in float32: beyond this the second moment overflows for ever."""


class Moments(NamedTuple):
    """Of one adapter, in its layout."""

    exp_avg: Tensor
    """float32[P]"""
    exp_avg_sq: Tensor
    """float32[P]"""

    @classmethod
    def zero(cls, weights: Tensor) -> Moments:
        return cls(torch.zeros_like(weights), torch.zeros_like(weights))

    def to(self, device: torch.device) -> Moments:
        return Moments(self.exp_avg.to(device), self.exp_avg_sq.to(device))


class Update(NamedTuple):
    """A step of one run. Weights and moments change in place, the gradient if it is clipped."""

    weights: Tensor
    """float32[P]"""
    gradient: Tensor
    """float32[P]"""
    moments: Moments
    num_steps: int
    """Taken before this one."""
    hyper: OptimStep


def step(updates: Sequence[Update], norms: Sequence[float]) -> list[float | Failure]:
    """Take the steps. `norms` are those of the whole gradients, of which this process may have
    but a part; they come back, or a Failure where nothing has changed."""
    scales = [
        _clip_coefficient(norm, update.hyper.grad_clip_norm)
        for update, norm in zip(updates, norms, strict=True)
    ]
    outcomes = [
        norm if norm * scale < _LARGEST_NORM else _too_large(norm)
        for norm, scale in zip(norms, scales, strict=True)
    ]
    good = [i for i, outcome in enumerate(outcomes) if not isinstance(outcome, Failure)]
    clipped = [i for i in good if scales[i] < 1.0]
    if clipped:
        torch._foreach_mul_([updates[i].gradient for i in clipped], [scales[i] for i in clipped])
    for _, alike in groupby(sorted((updates[i] for i in good), key=_hyper), key=_hyper):
        _apply(list(alike))
    return outcomes


def _clip_coefficient(norm: float, limit: float) -> float:
    """As torch.nn.utils.clip_grad_norm_, whose 1e-6 keeps a zero gradient from dividing by 0."""
    return min(1.0, limit / (norm + 1e-6)) if limit > 0 else 1.0


def _too_large(norm: float) -> Failure:
    # An infinite norm has no direction left that clipping could keep.
    advice = "set grad_clip_norm or " if math.isfinite(norm) else ""
    return Failure(
        message=f"The accumulated gradient has norm {norm:g}, too large for a step; "
        f"{advice}load a checkpoint.",
        category="user",
    )


def _hyper(update: Update) -> tuple[float, float, float, float, float]:
    """What must be equal in one call."""
    hyper = update.hyper
    return hyper.learning_rate, hyper.beta1, hyper.beta2, hyper.eps, hyper.weight_decay


def _apply(updates: Sequence[Update]) -> None:
    lr, beta1, beta2, eps, weight_decay = _hyper(updates[0])
    taken = torch.tensor([float(u.num_steps) for u in updates], device=updates[0].weights.device)
    adamw(
        [update.weights for update in updates],
        [update.gradient for update in updates],
        [update.moments.exp_avg for update in updates],
        [update.moments.exp_avg_sq for update in updates],
        [],
        list(taken),
        fused=True,
        amsgrad=False,
        beta1=beta1,
        beta2=beta2,
        lr=lr,
        weight_decay=weight_decay,
        eps=eps,
        maximize=False,
    )


def save(moments: Moments | None, num_steps: int, layout: Layout, path: Path) -> None:
    """Write them as `<tensor>.exp_avg` and `<tensor>.exp_avg_sq` (safetensors)."""
    tensors = {}
    if moments is not None:
        host = moments.to(torch.device("cpu"))
        for kind in ("exp_avg", "exp_avg_sq"):
            for name, tensor in layout.named_tensors(getattr(host, kind)):
                tensors[f"{name}.{kind}"] = tensor.contiguous()
    save_file(tensors, path, metadata={"format": "pt", "num_steps": str(num_steps)})


def load(layout: Layout, path: Path) -> tuple[Moments | None, int]:
    """Those saved for an adapter of the same layout, on the CPU, and the steps they come from.
    Raises OSError or SafetensorError when the file cannot be read or lacks a tensor, ValueError
    when one has another shape."""
    with safe_open(path, framework="pt") as file:
        num_steps = int(file.metadata()["num_steps"])
        if num_steps == 0:
            return None, 0
        flats = [
            layout.flat(lambda name, kind=kind: file.get_tensor(f"{name}.{kind}"))
            for kind in ("exp_avg", "exp_avg_sq")
        ]
        return Moments(*flats), num_steps
