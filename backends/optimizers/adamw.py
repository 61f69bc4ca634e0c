"""AdamW for one run: torch's own, with hyperparameters that may change at every step."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from backends.contract import Failure, OptimStep, StepResult
from backends.lora.adapter import Adapter

_MOMENTS = ("exp_avg", "exp_avg_sq")
_LARGEST_NORM = 1e18
"""AdamW squares the gradient in float32: beyond this the second moment overflows for ever."""


class AdamW:
    """The moments of one adapter, float32, made at the first step. Weights are updated in place."""

    def __init__(self, adapter: Adapter) -> None:
        self._named = dict(adapter.named_tensors())
        self._torch = torch.optim.AdamW(self._named.values(), foreach=True)
        self.num_steps = 0

    def step(
        self, gradient: Sequence[Tensor] | None, hyper: OptimStep, num_gradients: int
    ) -> StepResult | Failure:
        """Apply a gradient, which is scaled in place if clipped; a Failure changes nothing.

        Without a gradient (None) weights and moments stay as they are, as in torch. Metrics:
        `grad_norm`, global L2 norm before clipping; `num_gradients`, how many forward_backward
        requests were added up (0: the step did nothing); `step`, steps taken in this run so far.
        """
        norm = 0.0
        if gradient is not None:
            norm = torch.nn.utils.get_total_norm(gradient).item()
            scale = _clip_coefficient(norm, hyper.grad_clip_norm)
            if not norm * scale < _LARGEST_NORM:
                # An infinite norm has no direction left that clipping could keep.
                advice = "set grad_clip_norm or " if math.isfinite(norm) else ""
                return Failure(
                    message=f"The accumulated gradient has norm {norm:g}, too large for a step; "
                    f"{advice}load a checkpoint.",
                    category="user",
                )
            if scale < 1.0:
                torch._foreach_mul_(list(gradient), scale)
            self._apply(gradient, hyper)
        return StepResult(
            metrics={
                "grad_norm": norm,
                "num_gradients": float(num_gradients),
                "step": float(self.num_steps),
            }
        )

    def _apply(self, gradient: Sequence[Tensor], hyper: OptimStep) -> None:
        self._torch.param_groups[0].update(
            lr=hyper.learning_rate,
            betas=(hyper.beta1, hyper.beta2),
            eps=hyper.eps,
            weight_decay=hyper.weight_decay,
        )
        for tensor, grad in zip(self._named.values(), gradient, strict=True):
            tensor.grad = grad
        self._torch.step()
        self._torch.zero_grad(set_to_none=True)
        self.num_steps += 1

    def save(self, path: Path) -> None:
        """Write the moments as `<tensor>.exp_avg` and `<tensor>.exp_avg_sq` (safetensors)."""
        moments = {
            f"{name}.{moment}": self._torch.state[tensor][moment].cpu()
            for name, tensor in self._named.items()
            if tensor in self._torch.state
            for moment in _MOMENTS
        }
        save_file(moments, path, metadata={"format": "pt", "num_steps": str(self.num_steps)})

    def load(self, path: Path) -> None:
        """Take up moments saved for an adapter of the same shape. Raises OSError or
        SafetensorError when the file cannot be read, or lacks a tensor."""
        with safe_open(path, framework="pt") as file:
            self.num_steps = int(file.metadata()["num_steps"])
            if self.num_steps == 0:
                return
            for name, tensor in self._named.items():
                state = {m: file.get_tensor(f"{name}.{m}").to(tensor.device) for m in _MOMENTS}
                # torch keeps one step count a tensor, on the CPU.
                self._torch.state[tensor] = {"step": torch.tensor(float(self.num_steps)), **state}


def _clip_coefficient(norm: float, limit: float) -> float:
    """As torch.nn.utils.clip_grad_norm_, whose 1e-6 keeps a zero gradient from dividing by 0."""
    return min(1.0, limit / (norm + 1e-6)) if limit > 0 else 1.0
