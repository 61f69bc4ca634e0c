"""The loop to the devices: choose, run, record. One dispatcher a base model.

A run's tensors are brought to the backend when its next request comes: from its last snapshot,
then by playing the journaled requests after it. That one path serves a restart of the server,
the death of a worker, and a run that had been put away.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import structlog
from sqlalchemy.exc import SQLAlchemyError

from backends.contract import BackendError, Failure, ForwardBackward, OptimStep, TrainingBackend
from server.checkpoints.service import Checkpoints
from server.core.fairness import VirtualCounters
from server.core.ids import RunId, TenantId
from server.core.records import Request
from server.core.requests import REPLAYED_KINDS, Kind
from server.core.schedule import Served, Tick, next_tick
from server.losses.service import with_loss
from server.runs import queries
from server.runs.execution import Executed, Execution
from server.runs.operations import decode
from server.runs.registry import LiveRun, Registry
from server.runs.service import adapter_spec
from server.store import journal
from server.store.database import AsyncSession
from server.store.ledger import Ledger, Outcome

log = structlog.get_logger()

_ATTEMPTS = 2
"""A request whose backend died this often is what kills it."""
_PAUSE_S = 0.02
"""After an error, so that two attempts never fall into one moment of a worker's end."""


class Restartable(TrainingBackend, Protocol):
    """A backend that a supervisor starts again when it dies."""

    generation: int
    """Grows with every start: what was in memory before is gone."""

    @property
    def alive(self) -> bool: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class DispatchSettings:
    token_budget: int
    gap_wait_s: float
    snapshot_after_s: float


@dataclass(frozen=True, slots=True)
class Snapshot:
    """A run's state in a folder, which no row names yet."""

    run: RunId
    folder: str
    seq: int
    """The state includes every request up to this one that has run."""

    async def put(self, db: AsyncSession) -> None:
        """From this commit on, a restore starts here."""
        await queries.change(db, self.run, snapshot_seq=self.seq, snapshot_folder=self.folder)
        await journal.prune_payloads(db, self.run, self.seq)


class Dispatcher:
    def __init__(
        self,
        *,
        base_model: str,
        backend: Restartable,
        registry: Registry,
        checkpoints: Checkpoints,
        ledger: Ledger,
        settings: DispatchSettings,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._base_model = base_model
        self._backend = backend
        self._registry = registry
        self._checkpoints = checkpoints
        self._ledger = ledger
        self._settings = settings
        self._clock = clock
        self._execution = Execution(backend, registry, checkpoints, clock)
        tenants: VirtualCounters[TenantId] = VirtualCounters()
        runs: VirtualCounters[RunId] = VirtualCounters()
        self._served = Served(tenants, runs)
        self._work = asyncio.Event()
        self._stopping = False
        self._attempts: dict[str, int] = {}
        self._recording: set[asyncio.Task[None]] = set()
        self._released: set[RunId] = set()

    def wake(self) -> None:
        self._work.set()

    def stop(self) -> None:
        """Finish the tick under way; what waits stays in the journal."""
        self._stopping = True
        self._work.set()

    async def run(self) -> None:
        """Until stopped. The supervision loop: whatever a tick raises fails that tick alone."""
        while not self._stopping:
            self._work.clear()
            try:
                await self._put_away()
                tick = self.choose()
            except Exception:
                log.exception("choosing_failed", model=self._base_model)
                await asyncio.sleep(_PAUSE_S)
                continue
            if tick is None:
                await self._idle()
                continue
            try:
                await self.step(tick)
            except Exception as error:
                log.exception("tick_failed", jobs=[job.request for job in tick.jobs])
                await self._fail(tick, f"{type(error).__name__}: {error}")
        await self._recorded()
        await self._snapshot_all()

    async def step(self, tick: Tick) -> None:
        """Run one batch of jobs and record what came of them."""
        tick = await self._without_stillborn(tick)
        if not tick.jobs:
            return
        started = time.perf_counter()
        try:
            executed = await self._execute(tick)
            self._account(tick, time.perf_counter() - started)
            snapshots = await self._unrepeatable(executed)
        except BackendError as error:
            await self._retry(tick, str(error))
            return
        await self._record(executed, snapshots)
        await self._snapshot_due(executed)

    async def _without_stillborn(self, tick: Tick) -> Tick:
        """Requests behind a creation that failed fail with its reason: restoring such a run would
        quietly train a fresh adapter."""
        refused, going = [], []
        for job in tick.jobs:
            error = self._registry.known(job.run).creation_error
            if error is None:
                going.append(job)
            else:
                why = f"the run was never created: {error}"
                refused.append(Executed(job, Outcome(error=why, error_category="user")))
        if refused:
            await self._record(refused)
        return Tick(tuple(going))

    async def _execute(self, tick: Tick) -> list[Executed]:
        lives = [self._registry.known(job.run) for job in tick.jobs]
        for live in lives:
            await self._bring(live, tick)
        generation = self._backend.generation
        if any(live.resident_in != generation for live in lives):
            raise BackendError("it was started again while runs were brought to it")
        self._ledger.mark_started(job.request for job in tick.jobs)
        executed = await self._execution.run(tick)
        if self._backend.generation != generation:
            # A sample may have started it again: an outcome can be that of one without the runs.
            raise BackendError("it was started again during the call")
        return executed

    def choose(self) -> Tick | None:
        """Take the jobs that run next off their queues; None when nothing is ready."""
        now = self._clock()
        ready = {
            live.run.id: list(live.queue.ready(now, self._settings.gap_wait_s))
            for live in self._mine()
            if len(live.queue)
        }
        waiting = [jobs[0] for jobs in ready.values() if jobs]
        self._served.tenants.set_active(job.tenant for job in waiting)
        self._served.runs.set_active(job.run for job in waiting)
        tick = next_tick(ready, self._served, self._settings.token_budget)
        if tick is None:
            return None
        if any(self._attempts.get(job.request) for job in tick.jobs):
            tick = Tick(tick.jobs[:1])  # one of these may have killed the backend: find out which
        for job in tick.jobs:
            self._registry.known(job.run).queue.take(job)
            self._served.charge(job)
        return tick

    async def _idle(self) -> None:
        """Until there is work, or a missing number has been waited for long enough."""
        ends = [
            end
            for live in self._mine()
            if (end := live.queue.gap_ends_at(self._settings.gap_wait_s)) is not None
        ]
        timeout = min(ends) - self._clock() if ends else None
        try:
            async with asyncio.timeout(None if timeout is None else max(timeout, 0.001)):
                await self._work.wait()
        except TimeoutError:
            pass

    def release(self, runs: Iterable[RunId]) -> None:
        """Their sessions are over: free their tensors once nothing of theirs waits."""
        self._released.update(runs)
        self.wake()

    async def _put_away(self) -> None:
        for run in [r for r in self._released if self._registry.idle(r)]:
            self._released.discard(run)
            live = self._registry.known(run)
            self._served.runs.forget(run)
            if live.resident_in != self._backend.generation:
                continue
            try:
                if live.unsaved_s > 0:
                    await self._snapshot(live)
                await self._backend.unload(run)
            except BackendError as error:
                log.warning("put_away_failed", run=run, why=str(error))
            live.resident_in = None

    def _mine(self) -> list[LiveRun]:
        return [live for live in self._registry if live.run.base_model == self._base_model]

    # ------------------------------------------------------------ bringing runs to the backend

    async def _bring(self, live: LiveRun, tick: Tick) -> None:
        """Make sure the backend holds the run as its finished requests left it."""
        if live.resident_in == self._backend.generation and self._backend.alive:
            return
        creates = tick.kind in {Kind.CREATE, Kind.LOAD} and tick.jobs[0].seq == 0
        live.restoring = True
        try:
            # Asking wakes a dead backend, and so settles which generation this is.
            await self._backend.describe()
            generation = self._backend.generation
            if not creates:
                await self._restore(live)
            live.resident_in = generation
        finally:
            live.restoring = False

    async def _restore(self, live: LiveRun) -> None:
        await self._recorded()
        run, started = live.run, time.perf_counter()
        if run.snapshot_folder is not None:
            folder = self._checkpoints.storage.path(run.snapshot_folder)
            await self._backend.load(run.id, folder, "snapshot")
        else:
            await self._backend.create(run.id, adapter_spec(run.lora))
        after = -1 if run.snapshot_seq is None else run.snapshot_seq
        requests = await self._ledger.db.read(lambda db: journal.replayable(db, run.id, after))
        log.info("run_restored", run=run.id, snapshot_seq=run.snapshot_seq, replayed=len(requests))
        for request in requests:
            await self._replay(live, request)
        if requests:  # the next crash would repeat it again
            live.unsaved_s += time.perf_counter() - started

    async def _replay(self, live: LiveRun, request: Request) -> None:
        operation = decode(request)
        if isinstance(operation, ForwardBackward):
            operation = await with_loss(self._ledger.db, operation, live.run.session_id)
            [result] = await self._backend.forward_backward([operation])
        else:
            assert isinstance(operation, OptimStep)
            [result] = await self._backend.optim_step([operation])
        if isinstance(result, Failure):  # it was done before: going on would be with other weights
            raise BackendError(f"request {request.id} cannot be repeated: {result.message}")

    async def _retry(self, tick: Tick, why: str) -> None:
        """A backend that died is started again; one that refused a call fails its jobs."""
        log.warning("backend_failed", why=why, alive=self._backend.alive, jobs=len(tick.jobs))
        for job in tick.jobs:
            # Whatever the call had done to the run's state is undone by restoring it.
            self._registry.known(job.run).resident_in = None
        attempts = {job: self._attempts.get(job.request, 0) + 1 for job in tick.jobs}
        if len(tick.jobs) == 1 and attempts[tick.jobs[0]] >= _ATTEMPTS:
            await self._fail(tick, why)
            return
        for job, count in attempts.items():
            self._attempts[job.request] = count
            self._registry.known(job.run).queue.put_back(job)
        self.wake()
        await asyncio.sleep(_PAUSE_S)

    async def _fail(self, tick: Tick, why: str) -> None:
        failed = [
            Executed(job, Outcome(error=f"the backend failed: {why}", error_category="server"))
            for job in tick.jobs
            if job.request in self._registry.known(job.run).pending
        ]
        for one in failed:
            self._registry.known(one.job.run).resident_in = None
        await self._record(failed)

    # ------------------------------------------------------------ recording

    async def _record(
        self, executed: Sequence[Executed], snapshots: Mapping[RunId, Snapshot] | None = None
    ) -> None:
        """Commit while the next tick computes, unless that must see it."""
        snapshots = snapshots or {}
        for one in executed:
            live = self._registry.known(one.job.run)
            live.pending.pop(one.job.request)
            if one.job.seq == 0:
                live.creation_error = one.outcome.error
            live.executed_seq = max(live.executed_seq, one.job.seq)
            self._attempts.pop(one.job.request, None)
        if snapshots:  # they include what is being recorded
            await self._recorded()
        tasks = [
            asyncio.create_task(self._commit(ones, snapshots.get(run)))
            for run, ones in _by_run(executed).items()
        ]
        for task in tasks:
            self._recording.add(task)
            task.add_done_callback(self._recording.discard)
        if snapshots or any(one.after is not None for one in executed):
            await asyncio.gather(*tasks)

    async def _recorded(self) -> None:
        """Until what was executed is on disk."""
        if self._recording:
            await asyncio.wait(self._recording)

    async def _commit(self, executed: Sequence[Executed], snapshot: Snapshot | None) -> None:
        """Outcomes of one run, with all that must become visible with them."""

        async def also(db: AsyncSession) -> None:
            for one in executed:
                if one.also is not None:
                    await one.also(db)
            if snapshot is not None:
                await snapshot.put(db)

        requests = [self._ledger.waiting(one.job.request) for one in executed]
        outcomes = [one.outcome for one in executed]
        try:
            await self._ledger.finish_all(list(zip(requests, outcomes, strict=True)), also)
        except SQLAlchemyError as error:
            log.exception("outcomes_refused", requests=[request.id for request in requests])
            self._registry.known(executed[0].job.run).resident_in = None
            why = f"its outcome could not be stored: {type(error).__name__}"
            failed = Outcome(error=why, error_category="server")
            await self._ledger.finish_all([(request, failed) for request in requests])
            return
        if snapshot is not None:
            self._adopt(snapshot)
        for one in executed:
            if one.after is not None:
                one.after()

    def _account(self, tick: Tick, seconds: float) -> None:
        total = sum(job.tokens for job in tick.jobs) or len(tick.jobs)
        for job in tick.jobs:
            if job.kind in REPLAYED_KINDS:
                share = (job.tokens or 1) / total
                self._registry.known(job.run).unsaved_s += seconds * share
        log.debug("tick", kind=tick.kind, jobs=len(tick.jobs), tokens=total, seconds=seconds)

    # ------------------------------------------------------------ snapshots

    async def _unrepeatable(self, executed: Sequence[Executed]) -> dict[RunId, Snapshot]:
        """Snapshots of the runs whose state no replay leads to, to be committed with the
        outcomes: a load, and a number that came after others had run without it."""
        snapshots = {}
        for run, ones in _by_run(executed).items():
            live = self._registry.known(run)
            if any(_replaces(one, live) for one in ones):
                seq = max(live.executed_seq, *(one.job.seq for one in ones))
                snapshots[run] = await self._save(live, seq)
        return snapshots

    async def _snapshot_due(self, executed: Sequence[Executed]) -> None:
        for run in _by_run(executed):
            live = self._registry.known(run)
            if live.unsaved_s >= self._settings.snapshot_after_s:
                await self._try_snapshot(live)

    async def _snapshot_all(self) -> None:
        """On the way out, so that the next start has nothing to repeat."""
        for live in self._mine():
            if live.unsaved_s > 0 and live.resident_in == self._backend.generation:
                await self._try_snapshot(live)

    async def _try_snapshot(self, live: LiveRun) -> None:
        """Without one the journal still leads to the run's state."""
        try:
            await self._snapshot(live)
        except (BackendError, SQLAlchemyError, OSError) as error:
            log.warning("snapshot_failed", run=live.run.id, why=str(error))

    async def _snapshot(self, live: LiveRun) -> None:
        """Save the run's state and make it the one that a restore starts from."""
        await self._recorded()
        snapshot = await self._save(live, live.executed_seq)
        await self._ledger.db.write(snapshot.put)
        self._adopt(snapshot)

    async def _save(self, live: LiveRun, seq: int) -> Snapshot:
        storage = self._checkpoints.storage
        snapshot = Snapshot(live.run.id, storage.new(), seq)
        await self._backend.save(live.run.id, storage.path(snapshot.folder), "snapshot")
        return snapshot

    def _adopt(self, snapshot: Snapshot) -> None:
        """It is committed: the one before it can go."""
        live = self._registry.known(snapshot.run)
        previous = live.run.snapshot_folder
        live.run = replace(live.run, snapshot_seq=snapshot.seq, snapshot_folder=snapshot.folder)
        live.unsaved_s = 0.0
        self._checkpoints.retire(previous)


def _by_run(executed: Sequence[Executed]) -> dict[RunId, list[Executed]]:
    """In the order they were executed in."""
    by_run: dict[RunId, list[Executed]] = {}
    for one in executed:
        by_run.setdefault(one.job.run, []).append(one)
    return by_run


def _replaces(one: Executed, live: LiveRun) -> bool:
    late = one.job.kind in REPLAYED_KINDS and one.job.seq < live.executed_seq
    return one.outcome.error is None and (one.replaces_state or late)
