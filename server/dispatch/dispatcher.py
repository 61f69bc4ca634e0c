"""The loop to the devices: choose, run, record. One dispatcher a trainer group.

It chooses (`choosing.py`) among the runs that the backend holds (`residency.py`). Others that have
work are brought there beside the ticks (`restoring.py`): from their last snapshots
(`snapshots.py`), then by playing the journaled requests after them. That one path serves a restart
of the server, the death of a worker, and a run that had been put away or comes from another group
(`pool.py`). What came of a tick is committed while the next one computes (`recording.py`).
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Protocol

import structlog

from backends.contract import BackendError
from server.checkpoints.service import Checkpoints
from server.core.fairness import GroupedCounters, VirtualCounters
from server.core.ids import RequestId, RunId
from server.core.requests import REPLAYED_KINDS, Job
from server.core.schedule import Served, Tick
from server.dispatch.choosing import Chooser, DispatchSettings
from server.dispatch.departing import Departures
from server.dispatch.device import Device, Lost, Restartable
from server.dispatch.recording import Recorder
from server.dispatch.residency import Residency
from server.dispatch.restoring import Restoring
from server.dispatch.snapshots import Snapshot, Snapshots
from server.runs.execution import Executed, Execution
from server.runs.registry import LiveRun, Registry
from server.store.ledger import Ledger, Outcome

log = structlog.get_logger()

_ATTEMPTS = 2
"""A request whose backend died this often is what kills it."""
_PAUSE_S = 0.02
"""After a bug in choosing, so that it does not take the whole processor."""


class Surroundings(Protocol):
    """What the groups of a base model do for each other."""

    attempts: dict[RequestId, int]
    """How often a backend has died of a request."""

    def elsewhere(self, trainer: str) -> bool:
        """Whether another group that is alive takes this one's runs."""
        ...

    def rescue(self, trainer: str) -> None:
        """It is dead, and others take its runs."""
        ...

    def left(self, live: LiveRun) -> None:
        """No group has the run any more; it may have work."""
        ...


class Dispatcher:
    """Of the trainer group `name`; `recorder` is that of all groups: a run that comes from another
    must find everything on disk that was executed there."""

    def __init__(
        self,
        *,
        name: str,
        base_model: str,
        backend: Restartable,
        registry: Registry,
        checkpoints: Checkpoints,
        ledger: Ledger,
        recorder: Recorder,
        surroundings: Surroundings,
        settings: DispatchSettings,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self.name = name
        self._registry = registry
        self._ledger = ledger
        self._surroundings = surroundings
        self._snapshot_after_s = settings.snapshot_after_s
        self._device = Device(name, backend, lambda: surroundings.elsewhere(name))
        self._execution = Execution(backend, registry, checkpoints, clock)
        self._recorder = recorder
        self._snapshots = Snapshots(
            device=self._device,
            registry=registry,
            checkpoints=checkpoints,
            db=ledger.db,
            recorded=self._recorder.recorded,
        )
        self._served = Served(VirtualCounters(settings.tenant_weights), GroupedCounters())
        self._residency = Residency(
            device=self._device,
            registry=registry,
            restoring=Restoring(
                device=self._device,
                storage=checkpoints.storage,
                db=ledger.db,
                recorded=self._recorder.recorded,
                token_budget=settings.token_budget,
            ),
            snapshots=self._snapshots,
            memory_bytes=settings.run_memory_bytes,
            restore_failed=self._restore_failed,
            gone=self._gone,
            wake=self.wake,
        )
        self._attempts = surroundings.attempts
        self._chooser = Chooser(
            base_model=base_model,
            trainer=name,
            registry=registry,
            residency=self._residency,
            served=self._served,
            suspects=self._attempts,
            settings=settings,
            clock=clock,
        )
        self._departures = Departures(self._device, self._residency)
        self.has = self._departures.has
        self.abandon = self._residency.abandon
        self._work = asyncio.Event()
        self._stopping = False
        self.ticks = 0
        self.tokens = 0
        """What went through the model in them."""

    def wake(self) -> None:
        self._work.set()
        self._departures.look_again()

    def stop(self) -> None:
        """Finish the tick under way; what waits stays in the journal."""
        self._stopping = True
        self._work.set()

    def hold(self) -> None:
        """Begin nothing new until `let_go`; what is under way goes on."""
        self._departures.held = True
        self._departures.look_again()

    def let_go(self) -> None:
        self._departures.held = False
        self.wake()

    def release(self, runs: Iterable[RunId]) -> None:
        """Their sessions are over: free their tensors once nothing of theirs waits."""
        self._residency.release(runs)
        self.wake()

    async def send_away(self, live: LiveRun) -> None:
        """Have the run leave, its state on disk, at the end of the request that it is in."""
        try:
            await self._departures.leave(live)
        finally:
            self.wake()
        self.forget(live)

    def forget(self, live: LiveRun) -> None:
        """The run is another group's from now on, or nobody's."""
        self._registry.assign(live, None)
        self._served.runs.forget(live.run.owner, live.run.id)

    def _gone(self, live: LiveRun) -> None:
        self.forget(live)
        self._surroundings.left(live)

    async def run(self) -> None:
        """Until stopped. The supervision loop: whatever a tick raises fails that tick alone."""
        while not self._stopping:
            self._work.clear()
            if self._departures.held:
                await self._work.wait()
                continue
            try:
                tick = self.choose()
            except Exception:
                log.exception("choosing_failed", trainer=self.name)
                await asyncio.sleep(_PAUSE_S)
                continue
            if tick is None:
                await self._idle()
                continue
            try:
                await self.step(tick)
            except Exception as error:
                log.exception("tick_failed", jobs=[job.request for job in tick.jobs])
                await self._fail(tick.jobs, f"{type(error).__name__}: {error}")
        await self._residency.stop()
        await self._recorder.recorded()
        await self._snapshot_all()

    def choose(self) -> Tick | None:
        if self._device.given_up:
            self._surroundings.rescue(self.name)
            return None
        tick = self._chooser.choose()
        self._departures.began(tick)
        return tick

    async def step(self, tick: Tick) -> None:
        """Run what was chosen and record what came of it."""
        try:
            await self._step(tick)
        finally:
            self._departures.ended()

    async def _step(self, tick: Tick) -> None:
        lives = {self._registry.known(job.run) for job in tick.jobs}
        tick = await self._without_stillborn(tick)
        if not tick.slices:
            return
        try:
            executed, snapshots = await self._execute(tick)
        except BackendError as error:
            await self._retry(tick, error)
            return
        await self._record(executed, snapshots)
        await self._snapshots.try_each(
            one for one in lives if one.unsaved_s >= self._snapshot_after_s
        )

    async def _without_stillborn(self, tick: Tick) -> Tick:
        """Requests behind a creation that failed fail with its reason: restoring such a run would
        quietly train a fresh adapter."""
        refused, going = [], []
        for taken in tick.slices:
            error = self._registry.known(taken.job.run).creation_error
            if error is None:
                going.append(taken)
            else:
                why = f"the run was never created: {error}"
                refused.append(Executed(taken.job, Outcome(error=why, error_category="user")))
        if refused:
            await self._record(refused)
        return Tick(tuple(going))

    async def _execute(self, tick: Tick) -> tuple[list[Executed], dict[LiveRun, Snapshot]]:
        lives = [self._registry.known(job.run) for job in tick.jobs]
        creates = tick.jobs[0].creates
        async with self._device.turn() as here:
            if not creates and any(live.resident_in != here for live in lives):
                raise Lost("it was started again before the tick")
            self._ledger.mark_started(one.job.request for one in tick.slices if not one.first)
            began = time.perf_counter()
            executed = await self._execution.run(tick)
            self._account(tick, time.perf_counter() - began)
            if creates and executed[0].outcome.error is None:
                lives[0].resident_in = here
                self._residency.add(lives[0])
            snapshots = await self._snapshots.of_unrepeatable(executed)
        self._residency.used(tick)
        return executed, snapshots

    def _account(self, tick: Tick, seconds: float) -> None:
        self.ticks += 1
        self.tokens += tick.tokens
        total = tick.tokens or len(tick.slices)
        for one in tick.slices:
            if one.job.kind in REPLAYED_KINDS:
                self._registry.known(one.job.run).computed(one, seconds * (one.tokens or 1) / total)
        log.debug("tick", kind=tick.kind, jobs=len(tick.slices), tokens=total, seconds=seconds)

    async def _record(
        self, executed: Sequence[Executed], snapshots: Mapping[LiveRun, Snapshot] | None = None
    ) -> None:
        for one in executed:
            self._attempts.pop(one.job.request, None)
        await self._recorder.record(executed, snapshots or {})

    async def _snapshot_all(self) -> None:
        """On the way out, so that the next start has nothing to repeat."""
        await self._snapshots.try_each(one for one in self._residency.held() if one.unsaved_s > 0)

    async def _idle(self) -> None:
        """Until there is work, or a missing number has been waited for long enough."""
        timeout = self._chooser.gap_ends_in()
        try:
            async with asyncio.timeout(None if timeout is None else max(timeout, 0.001)):
                await self._work.wait()
        except TimeoutError:
            pass

    # ------------------------------------------------------------ what goes wrong

    async def _retry(self, tick: Tick, error: BackendError) -> None:
        """What a backend that died was doing is done again; what kills it, or what one that lives
        refuses, fails."""
        log.warning("backend_failed", why=str(error), jobs=[job.request for job in tick.jobs])
        for job in tick.jobs:
            # Whatever the call had done to the run's state is undone by restoring it.
            self._registry.known(job.run).resident_in = None
        guilty = not isinstance(error, Lost) and [self._blame(job) for job in tick.jobs] == [True]
        if guilty:
            await self._fail(tick.jobs, str(error))
            return
        for job in tick.jobs:
            self._registry.known(job.run).queue.put_back(job)

    async def _restore_failed(self, head: Job, error: Exception) -> None:
        """Of the run that this request waits for."""
        if not isinstance(error, BackendError):
            await self._fail([head], f"{type(error).__name__}: {error}")
        elif self._blame(head):
            await self._fail([head], str(error))

    def _blame(self, job: Job) -> bool:
        """Whether the backend has died of it too often."""
        self._attempts[job.request] = self._attempts.get(job.request, 0) + 1
        return self._attempts[job.request] >= _ATTEMPTS

    async def _fail(self, jobs: Sequence[Job], why: str) -> None:
        failed = [
            Executed(job, Outcome(error=f"the backend failed: {why}", error_category="server"))
            for job in jobs
            if self._registry.is_pending(job)
        ]
        for one in failed:
            self._registry.known(one.job.run).resident_in = None
        await self._record(failed)
