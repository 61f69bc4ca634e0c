"""The runs that this process knows: their queues, and where their state is."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from weakref import WeakValueDictionary

from backends.contract import ForwardBackward
from server.core.errors import NotFound
from server.core.ids import RequestId, RunId, SessionId, TenantId
from server.core.recent import Recent
from server.core.records import Request, Run
from server.core.requests import Job, Slice
from server.core.sequence import RunQueue
from server.runs.operations import Operation
from server.runs.parts import lengths_of
from server.store.bell import Bell

OnInflight = Callable[[Run, str], None]
"""Gets the run as it was, and the folder of its newer weights."""
Residence = tuple[str, int]
"""A trainer group by name, and which of its generations."""


@dataclass(frozen=True, slots=True)
class Pending:
    """A request that has no outcome yet, decoded."""

    operation: Operation
    payload_bytes: int


@dataclass(slots=True, weakref_slot=True, eq=False)
class LiveRun:
    """One run in memory."""

    run: Run
    queue: RunQueue
    pending: dict[RequestId, Pending] = field(default_factory=dict)
    trainer: str | None = None
    """The group that it belongs to, while that has its tensors or work of it."""
    leaving: bool = False
    """It goes from there to another: nothing of it begins meanwhile."""
    resident_in: Residence | None = None
    """Where its tensors are in memory."""
    restoring: bool = False
    executed_seq: int = -1
    """The highest seq whose effect is in the tensors."""
    unsaved_s: float = 0.0
    """Computing that a crash would make the server repeat, and a snapshot save."""
    open_s: float = 0.0
    """That of a request which is not done yet: no snapshot has it."""
    creation_error: str | None = None
    """Why the run never came to be; nothing can be asked of it."""

    def computed(self, taken: Slice, seconds: float) -> None:
        self.open_s = seconds + (self.open_s if taken.first else 0.0)
        if not taken.more:
            self.unsaved_s += self.open_s
            self.open_s = 0.0


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
    """Loads a run on its first use, and forgets it when nothing of it waits, nobody holds it, and
    many others have been used since."""

    def __init__(self, fetch: Callable[[RunId], Awaitable[Stored | None]]) -> None:
        self._fetch = fetch
        self._runs: WeakValueDictionary[RunId, LiveRun] = WeakValueDictionary()
        self._recent: Recent[RunId, LiveRun] = Recent()
        self._members: defaultdict[str, WeakValueDictionary[RunId, LiveRun]] = defaultdict(
            WeakValueDictionary
        )
        """Those that belong to a trainer group."""
        self._busy: defaultdict[str, dict[RunId, LiveRun]] = defaultdict(dict)
        """Those with pending requests, by base model."""
        self._pass_bytes: Counter[TenantId] = Counter()
        self._listeners: list[OnInflight] = []
        self.finished: Bell[TenantId] = Bell()
        """Rings for a tenant when one of its jobs has an outcome."""

    def listen(self, listener: OnInflight) -> None:
        """Have it told whenever a run's inflight samplers get newer weights."""
        self._listeners.append(listener)

    def show_inflight(self, live: LiveRun, folder: str) -> None:
        """From now on the run's inflight samplers use this folder."""
        before = live.run
        live.run = replace(before, inflight_folder=folder)
        for listener in self._listeners:
            listener(before, folder)

    def known(self, run: RunId) -> LiveRun:
        return self._runs[run]

    def assign(self, live: LiveRun, trainer: str | None) -> None:
        """The run, which is nowhere in memory, belongs to that group from now on, or to none."""
        if live.trainer is not None:
            self._members[live.trainer].pop(live.run.id, None)
        if trainer is not None:
            self._members[trainer][live.run.id] = live
        live.trainer, live.resident_in = trainer, None

    def members(self, trainer: str) -> list[LiveRun]:
        """The runs that belong to a trainer group."""
        return list(self._members[trainer].values())

    def busy(self, base_model: str, trainer: str | None) -> Iterator[LiveRun]:
        """The runs of one trainer group, or those without, of which anything waits or runs."""
        return (live for live in self._busy[base_model].values() if live.trainer == trainer)

    def is_pending(self, job: Job) -> bool:
        """Whether the job has no outcome yet."""
        live = self._runs.get(job.run)
        return live is not None and job.request in live.pending

    def waits(self, run: RunId) -> bool:
        """Whether anything of the run waits or runs."""
        live = self._runs.get(run)
        return live is not None and bool(live.pending)

    def pass_bytes(self, tenant: TenantId) -> int:
        """Payloads of the tenant's passes that wait or run."""
        return self._pass_bytes[tenant]

    def held_up(self, run: RunId) -> str | None:
        """Why nothing that waits for the run can begin, if it is not just another's turn."""
        live = self._runs.get(run)
        if live is None:
            return None
        if live.leaving:
            return "moving to another trainer"
        if live.restoring:
            return "restoring"
        return "every trainer is drained" if live.trainer is None else None

    def of_session(self, session: SessionId) -> list[LiveRun]:
        return [live for live in self._runs.values() if live.run.session_id == session]

    def add(self, run: Run) -> LiveRun:
        return self._remember(LiveRun(run, RunQueue()))

    async def get(self, run: RunId, owner: TenantId | None) -> LiveRun:
        """The run, if it exists and belongs to `owner` (None: to anyone). Raises NotFound."""
        live = self._runs.get(run) or await self._load(run)
        if live is None or (owner is not None and live.run.owner != owner):
            raise NotFound(f"model_id {run[:200]!r} does not exist")
        return self._remember(live)

    def push(self, live: LiveRun, request: Request, operation: Operation, now: float) -> None:
        """Queue a request that is journaled."""
        is_pass = isinstance(operation, ForwardBackward)
        num_bytes = len(request.payload or b"") if is_pass else 0
        live.pending[request.id] = Pending(operation, num_bytes)
        live.queue.add(_job(request, operation), now)
        self._busy[live.run.base_model][live.run.id] = live
        self._pass_bytes[request.owner] += num_bytes

    def finish(self, job: Job) -> None:
        """The job has an outcome: nothing of it will run any more."""
        live = self.known(job.run)
        live.queue.drop(job)
        self._pass_bytes[job.tenant] -= live.pending.pop(job.request).payload_bytes
        if not live.pending:
            del self._busy[live.run.base_model][job.run]
        self.finished.ring(job.tenant)

    def _remember(self, live: LiveRun) -> LiveRun:
        """Another request may have loaded it in the meantime."""
        live = self._runs.setdefault(live.run.id, live)
        self._recent.put(live.run.id, live)
        return live

    async def _load(self, run: RunId) -> LiveRun | None:
        found = await self._fetch(run)
        if found is None:
            return None
        snapshot_seq = -1 if found.run.snapshot_seq is None else found.run.snapshot_seq
        return LiveRun(
            found.run,
            RunQueue(found.done_through, found.failed),
            executed_seq=max(found.done_through, snapshot_seq),
            creation_error=found.creation_error,
        )


def _job(request: Request, operation: Operation) -> Job:
    assert request.run_id is not None
    return Job(
        request=request.id,
        run=request.run_id,
        tenant=request.owner,
        seq=request.seq,
        kind=request.kind,
        lengths=lengths_of(operation) if isinstance(operation, ForwardBackward) else (),
    )
