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


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """A training request as the scheduler sees it."""

    request: RequestId
    run: RunId
    tenant: TenantId
    seq: int
    kind: Kind
    tokens: int = 0
    """What it costs: the tokens that go through the model."""
