"""One request on its way through a pass: nothing of it reaches the run before all is well."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from backends.contract import Category, Failure, ForwardBackward, LossResult
from backends.losses import loss_of
from backends.training.run_state import RunState


class Lane:
    """Collects the outputs, metrics and gradient of one ForwardBackward, or why it failed. Raises
    LossRefusedError when its custom loss is not allowed."""

    def __init__(self, request: ForwardBackward, run: RunState) -> None:
        self.request = request
        self.loss = loss_of(request)
        self.adapter = run.adapter.lane() if request.backward else run.adapter
        self._run = run
        self._outputs: dict[int, dict[str, np.ndarray]] = {}
        self._losses: dict[int, float] = {}
        self._metrics: dict[int, dict[str, float]] = {}
        self._gradient: list[Tensor] | None = None
        self._failure: Failure | None = None

    @property
    def failed(self) -> bool:
        return self._failure is not None

    def fail(self, message: str, category: Category) -> None:
        self._failure = self._failure or Failure(message=message, category=category)

    def record(
        self, datum: int, logprobs: np.ndarray, loss: np.ndarray, metrics: dict[str, float]
    ) -> None:
        """Keep a datum's outputs, or fail over one that is not finite. May be repeated."""
        self._outputs[datum] = {"logprobs": logprobs}
        if loss.shape == logprobs.shape:
            self._outputs[datum]["elementwise_loss"] = loss
        self._losses[datum] = float(loss.sum(dtype=np.float64))
        self._metrics[datum] = metrics
        for name, values in (("logprob", logprobs), ("loss", loss)):
            if not np.isfinite(values).all():
                position = int(np.argwhere(~np.isfinite(values))[0][0])
                self.fail(
                    f"datum {datum}: the {name} at position {position} is "
                    f"{values[position]}; the request's gradient is dropped",
                    "user",
                )

    def add_gradient(self, gradient: Sequence[Tensor]) -> None:
        """Add a microbatch's part, in the order of the adapter's tensors; takes it over."""
        if self._gradient is None:
            self._gradient = list(gradient)
        else:
            torch._foreach_add_(self._gradient, list(gradient))

    def finish(self) -> LossResult | Failure:
        """Add the gradient to the run if everything about the request is finite."""
        if self._gradient is not None and self._failure is None:
            if _all_finite(self._gradient):
                self._run.add_gradient(self._gradient)
            else:
                self.fail("the loss is finite but its gradient is not; it is dropped", "user")
        return self._failure or self._result()

    def _result(self) -> LossResult:
        outputs = tuple(self._outputs[i] for i in range(len(self.request.data)))
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


def _all_finite(tensors: Sequence[Tensor]) -> bool:
    """By the norm first, which reads each tensor once; it may overflow where no entry does."""
    if torch.nn.utils.get_total_norm(tensors).isfinite():
        return True
    return bool(torch.stack([t.isfinite().all() for t in tensors]).all())
