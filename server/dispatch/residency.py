"""Which runs the backend holds: those that have work are brought to it, and those that have none
make room. Both go on beside the ticks, a call at a time."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass, field

import structlog

from backends.contract import BackendError, RunMemory
from server.core.fairness import VirtualCounters
from server.core.ids import RunId, TenantId
from server.core.requests import Job, Kind
from server.core.schedule import Tick
from server.dispatch.device import Device, Lost
from server.dispatch.restoring import Restoring
from server.dispatch.snapshots import Snapshots
from server.runs.registry import LiveRun, Registry

log = structlog.get_logger()

_MOST_COMING = 4
"""Runs restored at a time: between two ticks each makes a call."""
_PAUSE_S = 1.0
"""After a backend failed to make room."""


@dataclass(slots=True)
class _Resident:
    live: LiveRun
    done: set[Kind] = field(default_factory=set)
    """What it has done since it came: the first pass and the first step make it grow."""
    stuck: bool = False
    """It could not be saved since it was last used."""


class Residency:
    """`restore_failed` hears of requests whose run could not be brought, `gone` of runs that were
    put away, for which work may have come by then; `wake` is called whenever anything has moved."""

    def __init__(
        self,
        *,
        device: Device,
        registry: Registry,
        restoring: Restoring,
        snapshots: Snapshots,
        memory_bytes: int,
        restore_failed: Callable[[Job, Exception], Awaitable[None]],
        gone: Callable[[LiveRun], None],
        wake: Callable[[], None],
    ) -> None:
        self._device = device
        self._registry = registry
        self._restoring = restoring
        self._snapshots = snapshots
        self._memory_bytes = memory_bytes
        self._restore_failed = restore_failed
        self._gone = gone
        self._wake = wake
        self._resident: OrderedDict[RunId, _Resident] = OrderedDict()
        """The one used last is the last."""
        self._grown = False
        """Whether more may be in memory than when it was last asked for."""
        self._over = False
        """Whether there was too much, and nothing idle to put away."""
        self._coming: dict[RunId, asyncio.Task[None]] = {}
        self._brought: VirtualCounters[TenantId] = VirtualCounters()
        self._leaving: set[RunId] = set()
        self._released: set[RunId] = set()
        self._tidying: asyncio.Task[None] | None = None

    def ready(self, live: LiveRun) -> bool:
        """Whether the backend holds the run, and will."""
        return self._device.holds(live) and live.run.id not in self._leaving

    def moving(self, run: RunId) -> bool:
        """Whether it is on its way here, or from here to disk."""
        return run in self._coming or run in self._leaving

    def held(self) -> list[LiveRun]:
        return [one.live for one in self._resident.values() if self._device.holds(one.live)]

    def add(self, live: LiveRun) -> None:
        """It has just come."""
        self._resident[live.run.id] = _Resident(live)
        self._resident.move_to_end(live.run.id)
        self._grown = True

    def used(self, tick: Tick) -> None:
        for job in tick.jobs:
            if resident := self._resident.get(job.run):
                self._resident.move_to_end(job.run)
                self._grown |= job.kind not in resident.done
                resident.done.add(job.kind)
                resident.stuck = False

    def bring(self, heads: Sequence[Job]) -> None:
        """Restore the runs of these requests, a few at a time, the tenants by turns."""
        self._brought.set_active(head.tenant for head in heads)
        away = [head for head in heads if head.run not in self._coming]
        for head in away:
            self._registry.known(head.run).restoring = True
        waiting = [head for head in away if head.run not in self._leaving]
        while waiting and len(self._coming) < _MOST_COMING:
            head = min(waiting, key=lambda one: self._brought.served(one.tenant))
            waiting.remove(head)
            self._brought.charge(head.tenant, 1)
            self._coming[head.run] = asyncio.create_task(self._bring(head))

    def abandon(self) -> None:
        """The backend is dead: nobody is brought here any more."""
        for task in self._coming.values():
            task.cancel()

    async def leave(self, live: LiveRun) -> None:
        """Free the run's memory here, whatever waits for it: elsewhere it starts from the snapshot
        that is taken now. Where none can be, the journal leads there all the same."""
        run = live.run.id
        self._leaving.add(run)
        try:
            if self._device.holds(live):
                if live.unsaved_s > 0:
                    await self._snapshots.attempt(live)
                await self._unload(run)
        except BackendError as error:
            log.warning("unload_failed", run=run, why=str(error))
            self._grown = True
        finally:
            live.resident_in = None
            self._resident.pop(run, None)
            self._leaving.discard(run)

    def release(self, runs: Iterable[RunId]) -> None:
        """Their sessions are over: free their tensors once nothing of theirs waits."""
        self._released.update(runs)

    def tidy(self) -> None:
        """Put away what was released, and what makes memory overflow."""
        if self._tidying is None and (self._grown or self._idle_released() or self._idle_over()):
            self._tidying = asyncio.create_task(self._tidy())

    def _idle_released(self) -> bool:
        return any(not self._registry.waits(run) for run in self._released)

    def _idle_over(self) -> bool:
        return self._over and any(
            not one.live.pending and not one.stuck for one in self._resident.values()
        )

    async def stop(self) -> None:
        """What moves is left where it is: the journal leads to it."""
        moving = self._moving()
        for task in moving:
            task.cancel()
        await asyncio.gather(*moving, return_exceptions=True)

    def _moving(self) -> list[asyncio.Task[None]]:
        return [*self._coming.values(), *([self._tidying] if self._tidying else [])]

    async def _bring(self, head: Job) -> None:
        """The supervision of one restore: whatever it raises fails what it was for alone."""
        live = self._registry.known(head.run)
        live.queue.begin_again()
        try:
            await self._restoring.restore(live)
            self.add(live)
        except Lost as error:
            log.info("restore_interrupted", run=head.run, why=str(error))
        except Exception as error:
            log.warning("restore_failed", run=head.run, exc_info=error)
            await self._restore_failed(head, error)
        finally:
            del self._coming[head.run]
            live.restoring = False
            self._wake()

    async def _tidy(self) -> None:
        try:
            for run in [run for run in self._released if not self._registry.waits(run)]:
                self._released.discard(run)
                if resident := self._resident.get(run):
                    await self._put_away(resident.live)
            if self._grown or self._over:
                self._grown = False
                self._over = await self._make_room()
        except BackendError as error:
            log.warning("put_away_failed", why=str(error))
            self._grown = True
            await asyncio.sleep(_PAUSE_S)
        finally:
            self._tidying = None
            self._wake()

    async def _make_room(self) -> bool:
        """Put away idle runs, those that were not used for longest first, until the rest fits.
        Whether there is still too much."""
        async with self._device.turn():
            report = await self._device.backend.memory()
            held = self._forget_lost()
            for run in report.runs.keys() - {*held, *self._coming}:
                await self._device.backend.unload(run)  # a call that failed has left it there
        excess = sum(_most(report.runs[run]) for run in held) - self._memory_bytes
        for run in held:
            if excess <= 0:
                break
            resident = self._resident.get(run)
            if resident is None or await self._put_away(resident.live):
                excess -= _most(report.runs[run])
        return excess > 0

    def _forget_lost(self) -> list[RunId]:
        """Those that are left: what a backend that died had held is gone."""
        for live in [one.live for one in self._resident.values()]:
            if not self._device.holds(live):
                del self._resident[live.run.id]
        return list(self._resident)

    async def _put_away(self, live: LiveRun) -> bool:
        """Whether its memory is free: not if anything waits for it, or if it cannot be saved."""
        run = live.run.id
        if live.pending or not self.ready(live):
            return False
        self._leaving.add(run)
        try:
            if live.unsaved_s > 0 and not await self._snapshots.attempt(live):
                self._resident[run].stuck = True
                return False
            await self._unload(run)
            live.resident_in = None
            del self._resident[run]
        finally:
            self._leaving.discard(run)
        self._gone(live)
        return True

    async def _unload(self, run: RunId) -> None:
        async with self._device.turn():
            await self._device.backend.unload(run)


def _most(memory: RunMemory) -> int:
    """What it takes while it trains: its gradient, as large as its weights, comes and goes."""
    return 2 * memory.weights + memory.moments
