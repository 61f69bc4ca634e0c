"""What a worker is asked, and what it answers. The values inside are those of `contract.py`."""

from __future__ import annotations

from collections.abc import Sequence

from msgspec import Struct

from backends.contract import (
    AdapterSpec,
    Contents,
    CustomLoss,
    Failure,
    ForwardBackward,
    LossResult,
    MemoryReport,
    ModelInfo,
    OptimStep,
    Partial,
    PassOutcome,
    SampleDelta,
    SampleRequest,
    SampleResult,
    StepResult,
)

READY_CALL = 0
"""The id that the worker's `Ready` comes under; calls count from 1."""


class Describe(Struct, frozen=True, tag=True):
    pass


class CheckLoss(Struct, frozen=True, tag=True):
    loss: CustomLoss


class Create(Struct, frozen=True, tag=True):
    run: str
    spec: AdapterSpec


class RunForwardBackward(Struct, frozen=True, tag=True):
    requests: tuple[ForwardBackward, ...]


class RunOptimStep(Struct, frozen=True, tag=True):
    steps: tuple[OptimStep, ...]


class Save(Struct, frozen=True, tag=True):
    run: str
    directory: str
    contents: Contents


class Load(Struct, frozen=True, tag=True):
    run: str
    directory: str
    contents: Contents


class Unload(Struct, frozen=True, tag=True):
    run: str


class Memory(Struct, frozen=True, tag=True):
    pass


class Sample(Struct, frozen=True, tag=True):
    request: SampleRequest
    stream: bool = False
    """Whether `Progressed` replies are wanted before the last one."""


class Cancel(Struct, frozen=True, tag=True):
    request_id: str


class Update(Struct, frozen=True, tag=True):
    """Of the weights under requests."""

    old: str
    new: str


class Stop(Struct, frozen=True, tag=True):
    """Leave after the microbatch or token under way."""


TrainingCall = Describe | Create | RunForwardBackward | RunOptimStep | Save | Load | Unload | Memory
Call = TrainingCall | CheckLoss | Sample | Cancel | Update | Stop


class Failed(Struct, frozen=True, tag=True):
    value: Failure


class Loss(Struct, frozen=True, tag=True):
    value: LossResult


class Went(Struct, frozen=True, tag=True):
    """A part of a request went well."""

    value: Partial


class Stepped(Struct, frozen=True, tag=True):
    value: StepResult


class Ready(Struct, frozen=True, tag=True):
    """The model is loaded."""


class Done(Struct, frozen=True, tag=True):
    pass


class Described(Struct, frozen=True, tag=True):
    info: ModelInfo


class Checked(Struct, frozen=True, tag=True):
    refusal: str | None


class Losses(Struct, frozen=True, tag=True):
    outcomes: tuple[Loss | Went | Failed, ...]


class Steps(Struct, frozen=True, tag=True):
    outcomes: tuple[Stepped | Failed, ...]


class Saved(Struct, frozen=True, tag=True):
    num_bytes: int


class Loaded(Struct, frozen=True, tag=True):
    spec: AdapterSpec


class Remembered(Struct, frozen=True, tag=True):
    report: MemoryReport


class Sampled(Struct, frozen=True, tag=True):
    value: SampleResult


class Progressed(Struct, frozen=True, tag=True):
    """A streamed sample goes on; more replies come under the same id."""

    deltas: tuple[SampleDelta, ...]


class Broke(Struct, frozen=True, tag=True):
    """This call failed as a whole; the worker goes on."""

    message: str


Reply = (
    Ready
    | Done
    | Described
    | Checked
    | Losses
    | Steps
    | Saved
    | Loaded
    | Remembered
    | Progressed
    | Sampled
    | Failed
    | Broke
)


def losses(results: Sequence[PassOutcome]) -> Losses:
    return Losses(tuple(_passed(result) for result in results))


def steps(results: Sequence[StepResult | Failure]) -> Steps:
    return Steps(tuple(Failed(r) if isinstance(r, Failure) else Stepped(r) for r in results))


def sampled(result: SampleResult | Failure) -> Sampled | Failed:
    return Failed(result) if isinstance(result, Failure) else Sampled(result)


def _passed(result: PassOutcome) -> Loss | Went | Failed:
    match result:
        case LossResult():
            return Loss(result)
        case Partial():
            return Went(result)
        case Failure():
            return Failed(result)
