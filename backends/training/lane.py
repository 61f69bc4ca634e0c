"""One request on its way through a pass: nothing of it reaches the run before all is well."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from torch import Tensor

from backends.contract import (
    Category,
    Failure,
    ForwardBackward,
    LossResult,
    Partial,
    PassOutcome,
)
from backends.lora.adapter import Adapter
from backends.losses import loss_of
from backends.optimizers.norms import norms
from backends.training.run_state import RunState


class Lane:
    """Collects the outputs, metrics and gradient of one ForwardBackward, or why it failed; of all
    its parts if it comes in several. Raises LossRefusedError when its custom loss is not
    allowed."""

    def __init__(self, request: ForwardBackward, run: RunState) -> None:
        self.request = request
        """The part at hand. Its datums are numbered from 0 here, in failures from the first of
        the whole request."""
        self.loss = loss_of(request)
        self._run = run
        self._num_before = 0
        self._outputs: dict[int, dict[str, np.ndarray]] = {}
        self._losses: dict[int, float] = {}
        self._metrics: dict[int, dict[str, float]] = {}
        self.gradient: Tensor | None = None
        self._failure: Failure | None = None

    @property
    def adapter(self) -> Adapter:
        return self._run.adapter

    @property
    def num_data(self) -> int:
        """Of all parts so far."""
        return self._num_before + len(self.request.data)

    @property
    def failed(self) -> bool:
        return self._failure is not None

    @property
    def open(self) -> bool:
        """Whether its next part may come."""
        return self.request.more and not self.failed

    def go_on(self, part: ForwardBackward) -> None:
        """Take up the next part."""
        self._num_before = self.num_data
        self.request = part

    def fail(self, message: str, category: Category) -> None:
        self._failure = self._failure or Failure(message=message, category=category)

    def fail_datum(self, datum: int, reason: str, category: Category) -> None:
        self.fail(f"datum {self._num_before + datum}: {reason}", category)

    def record(
        self, datum: int, logprobs: np.ndarray, loss: np.ndarray, metrics: dict[str, float]
    ) -> None:
        """Keep a datum's outputs, or fail over one that is not finite. May be repeated."""
        number = self._num_before + datum
        self._outputs[number] = {"logprobs": logprobs}
        if loss.shape == logprobs.shape:
            self._outputs[number]["elementwise_loss"] = loss
        self._losses[number] = float(loss.sum(dtype=np.float64))
        self._metrics[number] = metrics
        for name, values in (("logprob", logprobs), ("loss", loss)):
            if not np.isfinite(values).all():
                position = int(np.argwhere(~np.isfinite(values))[0][0])
                reason = (
                    f"the {name} at position {position} is {values[position]}; "
                    "the request's gradient is dropped"
                )
                self.fail_datum(datum, reason, "user")

    def add_gradient(self, gradient: Tensor) -> None:
        """Add a microbatch's part float32[P]; takes it over."""
        if self.gradient is None:
            self.gradient = gradient
        else:
            self.gradient.add_(gradient)

    def hand_over(self, finite: bool) -> None:
        """Give the gradient to the run, or fail over one that is not finite."""
        assert self.gradient is not None
        if finite:
            self._run.add_gradient(self.gradient)
        else:
            self.fail("the loss is finite but its gradient is not; it is dropped", "user")

    def outcome(self) -> PassOutcome:
        if self._failure is not None:
            return self._failure
        return Partial() if self.request.more else self._result()

    def _result(self) -> LossResult:
        outputs = tuple(self._outputs[i] for i in range(self.num_data))
        loss = sum(self._losses[i] for i in range(len(outputs)))
        return LossResult(outputs=outputs, metrics={"loss:sum": loss, **self._reduced()})

    def _reduced(self) -> dict[str, float]:
        """Over datums, by the rule of the suffix; the client combines its chunks likewise."""
        by_name: dict[str, list[float]] = {}
        for datum in self._metrics.values():
            for name, value in datum.items():
                by_name.setdefault(name, []).append(value)
        return {
            name: sum(values) / len(values) if name.endswith(":mean") else sum(values)
            for name, values in by_name.items()
            # What its user computed is its user's to judge.
            if name.startswith("custom/") or np.isfinite(values).all()
        }


def finish_together(lanes: Sequence[Lane]) -> list[PassOutcome]:
    """Give each run the gradients of its requests that are complete, if everything about them is
    finite. The lane of a Partial is still open."""
    complete = [
        (lane, lane.gradient)
        for lane in lanes
        if lane.gradient is not None and not lane.failed and not lane.request.more
    ]
    finite = _finite([gradient for _, gradient in complete])
    for (lane, _), good in zip(complete, finite, strict=True):
        lane.hand_over(good)
    return [lane.outcome() for lane in lanes]


def _finite(gradients: Sequence[Tensor]) -> list[bool]:
    """By the norm first, which reads each once; it may overflow where no entry does."""
    return [
        math.isfinite(norm) or bool(gradient.isfinite().all())
        for gradient, norm in zip(gradients, norms(gradients), strict=True)
    ]
