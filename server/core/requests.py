"""A request's kinds, its life, and what the scheduler must know of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum

from server.core.ids import RequestId, RunId, TenantId


class Kind(StrEnum):
    """What a request asks for; the value is stored in the journal."""

    CREATE = "create"
    """Give a new run its adapter."""
    LOAD = "load"
    """Replace a run's state by a checkpoint's; also how a run is created from one."""
    FORWARD = "forward"
    """Compute a loss and leave no gradient."""
    FORWARD_BACKWARD = "forward_backward"
    """Compute a loss and add its gradient to the run's accumulator."""
    OPTIM_STEP = "optim_step"
    """Step the optimizer and clear the accumulator."""
    SAVE = "save"
    """Write a training checkpoint."""
    SAVE_FOR_SAMPLER = "save_for_sampler"
    """Publish the weights to sample from."""
    SAVE_EXTERNAL = "save_external"
    """Write the adapter for download."""
    CUSTOM_LOSS = "custom_loss"
    """Store a loss of the client's own."""
    SAMPLE = "sample"
    """Generate from a sampling session."""


PASS_KINDS = frozenset({Kind.FORWARD, Kind.FORWARD_BACKWARD})
REPLAYED_KINDS = frozenset({Kind.FORWARD_BACKWARD, Kind.OPTIM_STEP})
"""What is done again, in order, to bring a run from a snapshot to now."""


class State(StrEnum):
    """Where a request stands in the journal."""

    WAITING = "waiting"
    """Committed, and not yet known to have an outcome."""
    DONE = "done"
    """Its result is stored."""
    FAILED = "failed"
    """Its error is stored; it changed nothing."""


NEXT: Mapping[State, frozenset[State]] = {
    State.WAITING: frozenset({State.DONE, State.FAILED}),
    State.DONE: frozenset(),
    State.FAILED: frozenset(),
}


FIXED_COST_TOKENS = 32
"""What any request is charged beside its tokens, so that a flood of saves or steps counts too."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """A training request as the scheduler sees it."""

    request: RequestId
    run: RunId
    tenant: TenantId
    seq: int
    kind: Kind
    lengths: tuple[int, ...] = ()
    """Of a pass: the tokens of each datum."""

    @property
    def tokens(self) -> int:
        """What goes through the model."""
        return sum(self.lengths)

    @property
    def creates(self) -> bool:
        """Whether the run comes to be by it."""
        return self.seq == 0 and self.kind in {Kind.CREATE, Kind.LOAD}

    @property
    def whole(self) -> Slice:
        return Slice(self, 0, len(self.lengths))


@dataclass(frozen=True, slots=True)
class Slice:
    """The datums `first` to `last` (exclusive) of a job: what of it runs in one tick. A job
    without datums is one empty slice."""

    job: Job
    first: int
    last: int

    @property
    def more(self) -> bool:
        """Whether the job goes on after it."""
        return self.last < len(self.job.lengths)

    @property
    def tokens(self) -> int:
        return sum(self.job.lengths[self.first : self.last])

    @property
    def cost(self) -> int:
        """What is charged for it: the fixed part with the first slice of a job."""
        return self.tokens + (0 if self.first else FIXED_COST_TOKENS)
