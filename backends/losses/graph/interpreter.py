"""Running a checked graph on one datum."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from backends.losses.base import LossRefusedError
from backends.losses.graph.arguments import fill
from backends.losses.graph.limits import Budget
from backends.losses.graph.program import Program, Step
from backends.memory import is_out_of_memory

_FAILURES = (
    *(TypeError, ValueError, RuntimeError, IndexError, KeyError, AttributeError),
    *(ArithmeticError, AssertionError),
)
"""What torch and Python raise for arguments that do not fit."""


def run(program: Program, inputs: Sequence[Tensor], budget: Budget) -> dict[str, Any]:
    """Every node's value. Raises LossRefusedError, which names the node."""
    values: dict[str, Any] = dict(zip(program.inputs, inputs, strict=True))
    with warnings.catch_warnings():
        # Of shapes and deprecations: nobody who could act on them reads the server's log.
        warnings.simplefilter("ignore")
        for step in program.steps:
            values[step.name] = _run(step, values, budget)
    return values


def _run(step: Step, values: Mapping[str, Any], budget: Budget) -> Any:
    operation = step.operation
    try:
        args = tuple(fill(template, values) for template in step.args)
        kwargs = {name: fill(template, values) for name, template in step.kwargs.items()}
        elements, work = operation.size(operation.call, args, kwargs)
        budget.take(elements, operation.weight * work)
        result = operation.call(*args, **kwargs)
        budget.admit(result)
    except _FAILURES as error:
        if isinstance(error, RuntimeError) and is_out_of_memory(error):
            raise
        raise LossRefusedError(f"node {step.name!r} ({step.target}): {_brief(error)}") from error
    return result


def _brief(error: Exception) -> str:
    """The first line: torch's may go on with a trace of C++."""
    lines = str(error).splitlines()
    return lines[0][:200] if lines else type(error).__name__
