"""How a run leaves its trainer group: at the end of what of it is under way, its state on disk."""

from __future__ import annotations

import asyncio

from server.core.ids import RunId
from server.core.schedule import Tick
from server.dispatch.device import Device
from server.dispatch.residency import Residency
from server.runs.registry import LiveRun


class Departures:
    def __init__(self, device: Device, residency: Residency) -> None:
        self._device = device
        self._residency = residency
        self._under_way: frozenset[RunId] = frozenset()
        """The runs of the tick that was chosen last."""
        self._changed = asyncio.Event()
        self.held = False
        """Whether nothing begins: what has begun is not waited for then, but begins again
        elsewhere."""

    def has(self, live: LiveRun) -> bool:
        """Whether anything of the run is here that another group must not go past."""
        return (
            live.leaving
            or live.run.id in self._under_way
            or self._residency.moving(live.run.id)
            or self._device.holds(live)
        )

    def began(self, tick: Tick | None) -> None:
        self._under_way = frozenset(job.run for job in tick.jobs) if tick else frozenset()

    def ended(self) -> None:
        self._under_way = frozenset()
        self.look_again()

    def look_again(self) -> None:
        """What a run waits for may have come."""
        self._changed.set()

    async def leave(self, live: LiveRun) -> None:
        """Returns when nothing of the run is here any more. Nothing of it begins meanwhile; the
        request that it is in is finished first."""
        live.leaving = True
        try:
            while self._is_in_the_middle(live):
                self._changed.clear()
                await self._changed.wait()
            await self._residency.leave(live)
        finally:
            live.leaving = False

    def _is_in_the_middle(self, live: LiveRun) -> bool:
        run = live.run.id
        goes_on = live.queue.begun and self._device.holds(live) and not self.held
        return run in self._under_way or self._residency.moving(run) or goes_on
