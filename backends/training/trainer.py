"""The trainer: many runs on one frozen base model, all of which is in this process or which is
divided among several (`ranks.py`)."""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from pathlib import Path
from typing import Protocol

import torch

from backends.contract import (
    AdapterSpec,
    BackendError,
    Contents,
    CustomLoss,
    Failure,
    ForwardBackward,
    MemoryReport,
    ModelInfo,
    OptimStep,
    PassOutcome,
    RunMemory,
    StepResult,
)
from backends.lora.adapter import Target, fresh_adapter, trained_targets
from backends.losses import LOSSES, graph
from backends.losses.base import LossRefusedError
from backends.training.checks import refusal
from backends.training.lane import Lane, finish_together
from backends.training.ranks import Ranks
from backends.training.run_state import HOST, RunFolderError, RunState, step_together
from backends.training.slots import Slots


class CallRefusedError(BackendError):
    """This call did nothing, and all else is as it was; the message says why."""


class BaseModel(Protocol):
    """What the trainer must know of the model that all runs share."""

    eos_token_ids: tuple[int, ...]

    @property
    def name(self) -> str:
        """What it was loaded from."""
        ...

    @property
    def targets(self) -> tuple[Target, ...]:
        """The layers that adapters may change, whole, in the model's own order."""
        ...

    @property
    def groups(self) -> tuple[str, ...]:
        """Those that `targets` are in."""
        ...

    @property
    def device(self) -> torch.device: ...

    @property
    def dtype(self) -> torch.dtype: ...

    @property
    def vocab_size(self) -> int: ...

    @property
    def max_context_length(self) -> int: ...

    @property
    def num_parameters(self) -> int:
        """Of the whole model."""
        ...

    @property
    def num_bytes(self) -> int:
        """What this process has of it."""
        ...


RunPass = Callable[[Sequence[Lane], Callable[[], bool]], Generator[None, None, None]]
"""One pass over the base model: it fills the lanes with outputs and gradients, and pauses between
microbatches. The function is asked when memory ran out, and says whether there is more now."""


class Trainer:
    """Synchronous, for one thread. What fails for one run comes back as its Failure where the
    call returns one (an unknown run too, category `server`); create, load and save raise
    CallRefusedError instead."""

    def __init__(
        self, model: BaseModel, run_pass: RunPass, ranks: Ranks, device_bytes: int | None = None
    ) -> None:
        """`device_bytes` is how much the runs may take of an accelerator (None: what there is);
        beyond it those least recently used wait in host memory."""
        self._model = model
        self._run_pass = run_pass
        self._ranks = ranks
        self._runs: dict[str, RunState] = {}
        self._open: dict[str, Lane] = {}
        """Of requests whose last part is still to come, by run."""
        self._slots = Slots(self._runs, model.device, device_bytes)
        self._info = _describe(model)

    def info(self) -> ModelInfo:
        return self._info

    def check_loss(self, loss: CustomLoss) -> str | None:
        """Why the loss cannot be run, or None."""
        return graph.refusal(loss)

    def create(self, run: str, spec: AdapterSpec) -> None:
        """Give the run a fresh adapter in place of what it had."""
        if spec.rank < 1 or not trained_targets(spec, self._model.targets):
            raise CallRefusedError(f"run {run}: {spec} trains no layer of this model")
        adapter = fresh_adapter(spec, self._model.targets, HOST)
        self._replace(run, RunState(adapter, self._ranks))

    def load(self, run: str, directory: str | Path, contents: Contents) -> AdapterSpec:
        """Replace the run's state by a saved one, or raise CallRefusedError and leave it."""
        state, reason = None, None
        try:
            state = RunState.load(directory, contents, self._model.targets, self._ranks)
        except RunFolderError as error:
            reason = str(error)
        # Either all have it or none.
        reasons = [one for one in self._ranks.exchange(reason) if one is not None]
        if reasons or state is None:
            raise CallRefusedError(reasons[0])
        self._replace(run, state)
        return state.adapter.spec

    def save(self, run: str, directory: str | Path, contents: Contents) -> int:
        """Write the run's folder whole or not at all; its size in bytes, 0 where others lead."""
        if run not in self._runs:
            raise CallRefusedError(_not_loaded(run))
        return self._runs[run].save(directory, contents, self._model.name)

    def unload(self, run: str) -> None:
        self._open.pop(run, None)
        self._runs.pop(run, None)

    def _replace(self, run: str, state: RunState) -> None:
        self._open.pop(run, None)
        self._runs[run] = state
        self._slots.use([run])

    def memory(self) -> MemoryReport:
        """Of all ranks together."""
        own = MemoryReport(
            base_model=self._model.num_bytes,
            runs={run: state.memory(self._model.device) for run, state in self._runs.items()},
        )
        return _together(self._ranks.exchange(own))

    def optim_step(self, steps: Sequence[OptimStep]) -> list[StepResult | Failure]:
        """Step the runs together, no run twice."""
        known = [step for step in steps if step.run in self._runs]
        self._slots.use([step.run for step in known])
        runs = [self._runs[step.run] for step in known]
        results = iter(step_together(runs, known, self._ranks))
        return [
            next(results)
            if step.run in self._runs
            else Failure(message=_not_loaded(step.run), category="server")
            for step in steps
        ]

    def forward_backward(
        self, requests: Sequence[ForwardBackward]
    ) -> Generator[None, None, list[PassOutcome]]:
        """One packed pass, in one outcome a request. Pauses between microbatches, so that the
        caller can do other work; it must not step or replace these runs meanwhile. A generator
        that is closed early leaves no gradient, and ends the requests whose parts it had."""
        _refuse_what_follows_a_part(requests)
        admitted = [self._admit(request) for request in requests]
        lanes = [lane for lane in admitted if isinstance(lane, Lane)]
        runs = {lane.request.run for lane in lanes}
        self._slots.use(runs)
        yield from self._run_pass(lanes, lambda: self._slots.make_room(runs))
        outcomes = iter(finish_together(lanes, self._ranks))
        self._open |= {lane.request.run: lane for lane in lanes if lane.open}
        return [next(outcomes) if isinstance(entry, Lane) else entry for entry in admitted]

    def _admit(self, request: ForwardBackward) -> Lane | Failure:
        if request.run not in self._runs:
            return Failure(message=_not_loaded(request.run), category="server")
        lane = self._open.pop(request.run, None)
        reason = refusal(request, self._info, lane.num_data if lane else 0)
        if reason is not None:
            return Failure(message=reason, category="user")
        if lane is not None:
            lane.go_on(request)
            return lane
        try:
            return Lane(request, self._runs[request.run])
        except LossRefusedError as error:
            return Failure(message=f"custom loss: {error}", category="user")


def _together(reports: Sequence[MemoryReport]) -> MemoryReport:
    """Of one trainer, whose ranks all have something of each run."""
    runs = {
        run: RunMemory(
            weights=sum(report.runs[run].weights for report in reports),
            moments=sum(report.runs[run].moments for report in reports),
            gradient=sum(report.runs[run].gradient for report in reports),
            on_device=memory.on_device,
        )
        for run, memory in reports[0].runs.items()
    }
    return MemoryReport(base_model=sum(report.base_model for report in reports), runs=runs)


def _refuse_what_follows_a_part(requests: Sequence[ForwardBackward]) -> None:
    """A request's next part comes in the run's next call; whatever came between would be lost in
    it. Raises CallRefusedError."""
    begun: set[str] = set()
    for request in requests:
        if request.run in begun:
            raise CallRefusedError(f"run {request.run}: a request follows a part of another")
        if request.more:
            begun.add(request.run)


def _not_loaded(run: str) -> str:
    return f"run {run} is not loaded"


def _describe(model: BaseModel) -> ModelInfo:
    return ModelInfo(
        vocab_size=model.vocab_size,
        max_context_length=model.max_context_length,
        num_parameters=model.num_parameters,
        dtype=str(model.dtype).removeprefix("torch."),
        device=str(model.device),
        trainable_groups=model.groups,
        eos_token_ids=model.eos_token_ids,
        losses={name: loss.signature for name, loss in LOSSES.items()},
    )
