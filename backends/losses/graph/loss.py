"""A client's graph as a `Loss` like any other.

It runs on the CPU, where a bad index is an error and not the end of the device, on a leaf of its
own: its backward pass is over before the datum joins the packed one, so what fails fails alone.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from backends.contract import CustomLoss, LossSignature
from backends.losses.base import Config, Inputs, Loss, LossRefusedError, Metrics
from backends.losses.graph.interpreter import run
from backends.losses.graph.limits import Budget
from backends.losses.graph.program import Program, compiled
from backends.memory import is_out_of_memory


def custom_loss(loss: CustomLoss, num_data: int) -> Loss:
    """For a request of `num_data` datums, which share what it may compute. Raises
    LossRefusedError, and so does the loss."""
    program = compiled(loss)
    names = tuple(declared.name for declared in loss.inputs[1:])

    def compute(logprobs: Tensor, inputs: Inputs, config: Config) -> tuple[Tensor, Metrics]:
        leaf = logprobs.detach().to("cpu", copy=True).requires_grad_()
        tensors = [inputs[declared.name] for declared in loss.inputs[1:]]
        shaped = [
            tensor.reshape(()) if declared.rank == 0 else tensor
            for tensor, declared in zip(tensors, loss.inputs[1:], strict=True)
        ]
        with torch.enable_grad():
            values = run(program, [leaf, *shaped], Budget(leaf.numel(), num_data))
            value = _scalar_loss(program, values)
        metrics = {
            name: _metric(name, values[node], logprobs) for name, node in program.metrics.items()
        }
        return _with_gradient(value, leaf, logprobs), metrics

    return Loss(
        LossSignature(
            required=tuple(dict.fromkeys(("target_tokens", *names))),
            many_targets=loss.inputs[0].rank == 2,
        ),
        compute,
        raw_inputs=True,
    )


def _scalar_loss(program: Program, values: dict[str, Any]) -> Tensor:
    value = values[program.loss]
    if not isinstance(value, Tensor) or value.dim() != 0:
        shape = list(value.shape) if isinstance(value, Tensor) else type(value).__name__
        raise LossRefusedError(f"node {program.loss!r}: the loss is {shape}, not a scalar tensor")
    if not value.requires_grad:
        raise LossRefusedError(f"node {program.loss!r}: the loss does not depend on logprobs")
    value = value.float()
    if not value.isfinite():
        raise LossRefusedError(f"node {program.loss!r}: the loss is {value.item()}")
    return value


def _metric(name: str, value: Any, logprobs: Tensor) -> Tensor:
    if isinstance(value, Tensor):
        if value.numel() != 1:
            raise LossRefusedError(f"metric {name} has shape {list(value.shape)}, not one number")
        value = value.item()
    if not isinstance(value, int | float):
        raise LossRefusedError(f"metric {name} is a {type(value).__name__}, not a number")
    return logprobs.new_tensor(float(value), dtype=torch.float64)


def _with_gradient(value: Tensor, leaf: Tensor, logprobs: Tensor) -> Tensor:
    """The loss as a scalar on the device, with d loss / d logprobs put into the packed pass."""
    result = value.detach().to(logprobs)
    if not logprobs.requires_grad:
        return result
    gradient = _gradient(value, leaf)
    if not gradient.isfinite().all():
        position = (~gradient.isfinite()).nonzero()[0].tolist()
        raise LossRefusedError(f"the gradient of the loss is not finite at position {position}")
    return result + (gradient.to(logprobs) * (logprobs - logprobs.detach())).sum()


def _gradient(value: Tensor, leaf: Tensor) -> Tensor:
    try:
        [gradient] = torch.autograd.grad(value, [leaf])
    except RuntimeError as error:
        if is_out_of_memory(error):
            raise
        raise LossRefusedError(f"its backward pass failed: {str(error)[:200]}") from error
    return gradient
