"""The runs that this process knows: their queues, and where their state is."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace

from server.core.errors import NotFound
from server.core.ids import RequestId, RunId, SessionId, TenantId
from server.core.records import Request, Run
from server.core.requests import Job
from server.core.sequence import RunQueue
from server.runs.operations import Operation


@dataclass(slots=True)
class LiveRun:
    """One run in memory."""

    run: Run
    queue: RunQueue
    pending: dict[RequestId, tuple[Request, Operation]] = field(default_factory=dict)
    """What the queued jobs are, decoded."""
    resident_in: int | None = None
    """The generation of the backend that holds its tensors, or None."""
    restoring: bool = False
    executed_seq: int = -1
    """The highest seq whose effect is in the tensors."""
    unsaved_s: float = 0.0
    """Computing that a crash would make the server repeat."""
    creation_error: str | None = None
    """Why the run never came to be; nothing can be asked of it."""

    def push(self, job: Job, request: Request, operation: Operation, now: float) -> None:
        self.pending[job.request] = (replace(request, payload=None), operation)
        self.queue.add(job, now)

    def show_inflight(self, folder: str) -> None:
        """From now on the run's inflight samplers use this folder."""
        self.run = replace(self.run, inflight_folder=folder)


@dataclass(frozen=True, slots=True)
class Stored:
    """A run as the database has it."""

    run: Run
    done_through: int
    """The highest seq that was done, or -1."""
    failed: Sequence[int]
    """Those after it that failed."""
    creation_error: str | None = None


class Registry:
    """Loads a run on its first use."""

    def __init__(self, fetch: Callable[[RunId], Awaitable[Stored | None]]) -> None:
        self._fetch = fetch
        self._runs: dict[RunId, LiveRun] = {}

    def __iter__(self) -> Iterator[LiveRun]:
        return iter(self._runs.values())

    def known(self, run: RunId) -> LiveRun:
        return self._runs[run]

    def idle(self, run: RunId) -> bool:
        """Whether the run is in memory and nothing of it waits."""
        live = self._runs.get(run)
        return live is not None and not live.pending

    def restoring(self, run: RunId) -> bool:
        live = self._runs.get(run)
        return live is not None and live.restoring

    def of_session(self, session: SessionId) -> list[LiveRun]:
        return [live for live in self._runs.values() if live.run.session_id == session]

    def add(self, run: Run) -> LiveRun:
        return self._runs.setdefault(run.id, LiveRun(run, RunQueue()))

    async def get(self, run: RunId, owner: TenantId | None) -> LiveRun:
        """The run, if it exists and belongs to `owner` (None: to anyone). Raises NotFound."""
        live = self._runs.get(run) or await self._load(run)
        if live is None or (owner is not None and live.run.owner != owner):
            raise NotFound(f"model_id {run[:200]!r} does not exist")
        return live

    async def _load(self, run: RunId) -> LiveRun | None:
        found = await self._fetch(run)
        if found is None:
            return None
        snapshot_seq = -1 if found.run.snapshot_seq is None else found.run.snapshot_seq
        live = LiveRun(
            found.run,
            RunQueue(found.done_through, found.failed),
            executed_seq=max(found.done_through, snapshot_seq),
            creation_error=found.creation_error,
        )
        # Another request may have loaded it in the meantime.
        return self._runs.setdefault(run, live)
