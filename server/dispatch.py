"""The loop to the devices: choose, run, record. One dispatcher a base model.

A run's tensors are brought to the backend when its next request comes: from its last snapshot,
then by playing the journaled requests after it. That one path serves a restart of the server,
the death of a worker, and a run that had been put away.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Protocol

import structlog

from backends.contract import BackendError, ForwardBackward, OptimStep, TrainingBackend
from server.checkpoints.service import Checkpoints
from server.core.fairness import VirtualCounters
from server.core.ids import RunId, TenantId
from server.core.requests import Kind
from server.core.schedule import Served, Tick, next_tick
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
            await self._put_away()
            tick = self._choose()
            if tick is None:
                await self._idle()
                continue
            try:
                await self.step(tick)
            except Exception as error:
                log.exception("tick_failed", jobs=[job.request for job in tick.jobs])
                await self._fail(tick, f"{type(error).__name__}: {error}")
        await asyncio.gather(*self._recording)
        await self._snapshot_all()

    async def step(self, tick: Tick) -> None:
        """Run one batch of jobs and record what came of them."""
        lives = [self._registry.known(job.run) for job in tick.jobs]
        started = time.perf_counter()
        try:
            for live in lives:
                await self._bring(live, tick)
            executed = await self._execution.run(tick)
        except BackendError as error:
            await self._retry(tick, str(error))
            return
        self._account(tick, time.perf_counter() - started)
        await self._record(executed)

    def _choose(self) -> Tick | None:
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
            if live.resident_in != self._backend.generation:
                continue
            await asyncio.gather(*self._recording)
            if live.unsaved_s > 0:
                await self._snapshot(live)
            await self._backend.unload(run)
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
            if not creates:
                await self._restore(live)
            live.resident_in = self._backend.generation
        finally:
            live.restoring = False

    async def _restore(self, live: LiveRun) -> None:
        run = live.run
        await asyncio.gather(*self._recording)
        if run.snapshot_folder is not None:
            folder = self._checkpoints.storage.path(run.snapshot_folder)
            await self._backend.load(run.id, folder, "snapshot")
        else:
            await self._backend.create(run.id, adapter_spec(run.lora))
        after = -1 if run.snapshot_seq is None else run.snapshot_seq
        requests = await self._ledger.db.read(lambda db: journal.replayable(db, run.id, after))
        log.info("run_restored", run=run.id, snapshot_seq=run.snapshot_seq, replayed=len(requests))
        for request in requests:
            if request.kind is Kind.FORWARD_BACKWARD:
                operation = decode(request)
                assert isinstance(operation, ForwardBackward)
                await self._backend.forward_backward([operation])
            elif request.kind is Kind.OPTIM_STEP:
                operation = decode(request)
                assert isinstance(operation, OptimStep)
                await self._backend.optim_step([operation])

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

    async def _record(self, executed: list[Executed]) -> None:
        """Commit while the next tick computes; a state that no replay leads to, at once."""
        for one in executed:
            await self._settle(one)
        task = asyncio.create_task(self._commit(executed))
        self._recording.add(task)
        task.add_done_callback(self._recording.discard)
        if any(one.after is not None for one in executed):
            await task
        await self._snapshot_due(executed)

    async def _settle(self, one: Executed) -> None:
        """The job is no longer pending, and its effect, if any, is in the tensors."""
        live = self._registry.known(one.job.run)
        live.pending.pop(one.job.request)
        self._attempts.pop(one.job.request, None)
        late = one.job.seq < live.executed_seq and one.job.kind is not Kind.FORWARD
        live.executed_seq = max(live.executed_seq, one.job.seq)
        if one.outcome.error is None and (one.replaces_state or late):
            await asyncio.gather(*self._recording)
            await self._snapshot(live)

    async def _commit(self, executed: list[Executed]) -> None:
        await asyncio.gather(*(self._commit_one(one) for one in executed))

    async def _commit_one(self, one: Executed) -> None:
        request = self._ledger.waiting(one.job.request)
        await self._ledger.finish(request, one.outcome, one.also)
        if one.after is not None:
            one.after()

    def _account(self, tick: Tick, seconds: float) -> None:
        total = sum(job.tokens for job in tick.jobs) or len(tick.jobs)
        for job in tick.jobs:
            if job.kind in {Kind.FORWARD_BACKWARD, Kind.OPTIM_STEP}:
                share = (job.tokens or 1) / total
                self._registry.known(job.run).unsaved_s += seconds * share
        log.debug("tick", kind=tick.kind, jobs=len(tick.jobs), tokens=total, seconds=seconds)

    # ------------------------------------------------------------ snapshots

    async def _snapshot_due(self, executed: list[Executed]) -> None:
        for run in {one.job.run for one in executed}:
            live = self._registry.known(run)
            if live.unsaved_s >= self._settings.snapshot_after_s:
                await asyncio.gather(*self._recording)
                await self._snapshot(live)

    async def _snapshot_all(self) -> None:
        """On the way out, so that the next start has nothing to repeat."""
        for live in self._mine():
            if live.unsaved_s > 0 and live.resident_in == self._backend.generation:
                try:
                    await self._snapshot(live)
                except BackendError as error:
                    log.warning("snapshot_failed", run=live.run.id, why=str(error))

    async def _snapshot(self, live: LiveRun) -> None:
        """Save the run's state and make it the one that a restore starts from."""
        storage = self._checkpoints.storage
        folder, seq = storage.new(), live.executed_seq
        await self._backend.save(live.run.id, storage.path(folder), "snapshot")
        previous = live.run.snapshot_folder

        async def work(db: AsyncSession) -> None:
            await queries.change(db, live.run.id, snapshot_seq=seq, snapshot_folder=folder)
            await journal.prune_payloads(db, live.run.id, seq)

        await self._ledger.db.write(work)
        live.run = replace(live.run, snapshot_seq=seq, snapshot_folder=folder)
        live.unsaved_s = 0.0
        storage.remove(previous)
