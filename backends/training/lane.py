"""One request on its way through a pass: nothing of it reaches the run before all is well."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
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
from backends.lora.grouping import likeness
from backends.losses import loss_of
from backends.training.ranks import Part, Ranks
from backends.training.run_state import RunState


class _Datum(NamedTuple):
    """What came of one datum."""

    outputs: dict[str, np.ndarray]
    loss: float
    metrics: dict[str, float]


class Parcel(NamedTuple):
    """What a rank found for one lane: of the datums that it computed, by number, and what went
    wrong."""

    data: dict[int, _Datum]
    failure: Failure | None


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
        self._data: dict[int, _Datum] = {}
        self._gradient: Tensor | None = None
        self._failure: Failure | None = None

    @property
    def adapter(self) -> Adapter:
        """What this process has of it."""
        return self._run.adapter

    def likeness(self) -> tuple[float, ...]:
        """A key to sort by, the same on all ranks: neighbours may be computed together."""
        return likeness(self._run.whole, self.adapter.scale, self.request.num_tokens)

    @property
    def num_data(self) -> int:
        """Of all parts so far."""
        return self._num_before + len(self.request.data)

    @property
    def failed(self) -> bool:
        return self._failure is not None

    @property
    def complete(self) -> bool:
        """Whether its gradient is all that there will be of it."""
        wanted = self.request.backward and self.num_data > 0
        return wanted and not self.failed and not self.request.more

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
        outputs = {"logprobs": logprobs}
        if loss.shape == logprobs.shape:
            outputs["elementwise_loss"] = loss
        of_datum = _Datum(outputs, float(loss.sum(dtype=np.float64)), metrics)
        self._data[self._num_before + datum] = of_datum
        for name, values in (("logprob", logprobs), ("loss", loss)):
            if not np.isfinite(values).all():
                position = int(np.argwhere(~np.isfinite(values))[0][0])
                reason = (
                    f"the {name} at position {position} is {values[position]}; "
                    "the request's gradient is dropped"
                )
                self.fail_datum(datum, reason, "user")

    def parcel(self) -> Parcel:
        """What this process found in the part at hand."""
        new = {n: datum for n, datum in self._data.items() if n >= self._num_before}
        return Parcel(new, self._failure)

    def gather(self, parcels: Sequence[Parcel]) -> None:
        """Take up what all ranks found; of several failures the first is that of all."""
        failures = [parcel.failure for parcel in parcels]
        self._failure = next((failure for failure in failures if failure is not None), None)
        for parcel in parcels:
            self._data |= parcel.data

    def add_gradient(self, gradient: Tensor) -> None:
        """Add a microbatch's part float32[P]; takes it over."""
        if self._gradient is None:
            self._gradient = gradient
        else:
            self._gradient.add_(gradient)

    def part(self) -> Part:
        """The gradient that this process has found: zero if no datum came here."""
        flat = self._gradient
        if flat is None:
            flat = torch.zeros_like(self.adapter.flat)
        return Part(self._run.whole, flat)

    def hand_over(self, gradient: Tensor, finite: bool) -> None:
        """Give the run the request's gradient, or fail over one that is not finite."""
        if finite:
            self._run.add_gradient(gradient)
        else:
            self.fail("the loss is finite but its gradient is not; it is dropped", "user")

    def outcome(self) -> PassOutcome:
        if self._failure is not None:
            return self._failure
        return Partial() if self.request.more else self._result()

    def _result(self) -> LossResult:
        data = [self._data[i] for i in range(self.num_data)]
        metrics = {"loss:sum": sum(datum.loss for datum in data), **self._reduced(data)}
        return LossResult(outputs=tuple(datum.outputs for datum in data), metrics=metrics)

    def _reduced(self, data: Sequence[_Datum]) -> dict[str, float]:
        """Over datums, by the rule of the suffix; the client combines its chunks likewise."""
        by_name: dict[str, list[float]] = {}
        for datum in data:
            for name, value in datum.metrics.items():
                by_name.setdefault(name, []).append(value)
        return {
            name: sum(values) / len(values) if name.endswith(":mean") else sum(values)
            for name, values in by_name.items()
            # What its user computed is its user's to judge.
            if name.startswith("custom/") or np.isfinite(values).all()
        }


def finish_together(lanes: Sequence[Lane], ranks: Ranks) -> list[PassOutcome]:
    """Give each run the gradients of its requests that are complete, if everything about them is
    finite. The lane of a Partial is still open."""
    parcels = ranks.exchange([lane.parcel() for lane in lanes])
    for lane, of_lane in zip(lanes, zip(*parcels, strict=True), strict=True):
        lane.gather(of_lane)
    complete = [lane for lane in lanes if lane.complete]
    gradients = ranks.add_up([lane.part() for lane in complete])
    finite = _finite(gradients, ranks)
    for lane, gradient, good in zip(complete, gradients, finite, strict=True):
        lane.hand_over(gradient.flat, good)
    return [lane.outcome() for lane in lanes]


def _finite(parts: Sequence[Part], ranks: Ranks) -> list[bool]:
    """By the norm first, which reads each once; it may overflow where no entry does."""
    good = [
        math.isfinite(norm) or bool(part.flat.isfinite().all())
        for part, norm in zip(parts, ranks.norms(parts), strict=True)
    ]
    return [all(of_ranks) for of_ranks in zip(*ranks.exchange(good), strict=True)]
