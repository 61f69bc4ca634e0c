"""Restoring: from a run's last snapshot, then by playing the journaled requests after it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable

import structlog

from backends.contract import BackendError, Failure, ForwardBackward, OptimStep
from server.checkpoints.storage import Storage
from server.core.records import Request, Run
from server.dispatch.device import Device, Lost
from server.losses.service import with_loss
from server.runs.operations import decode
from server.runs.parts import parts
from server.runs.registry import LiveRun, Residence
from server.runs.service import adapter_spec
from server.store import journal
from server.store.database import Database

log = structlog.get_logger()


class Restoring:
    """`recorded` waits until what was executed is on disk. However many runs are restored at a
    time, one of them replays between two ticks, and `token_budget` tokens at most."""

    def __init__(
        self,
        *,
        device: Device,
        storage: Storage,
        db: Database,
        recorded: Callable[[], Awaitable[None]],
        token_budget: int,
    ) -> None:
        self._device = device
        self._storage = storage
        self._db = db
        self._recorded = recorded
        self._token_budget = token_budget
        self._replaying = asyncio.Lock()

    async def restore(self, live: LiveRun) -> None:
        """Have the backend hold the run as its finished requests left it. Raises BackendError, and
        Lost when the backend was started again in between."""
        await self._recorded()
        run = live.run
        async with self._device.turn() as here:
            await self._start(run)
        after = -1 if run.snapshot_seq is None else run.snapshot_seq
        requests = await self._db.read(lambda db: journal.replayable(db, run.id, after))
        seconds = 0.0
        for request in requests:
            seconds += await self._replay(run, request, here)
        log.info("run_restored", run=run.id, snapshot_seq=run.snapshot_seq, replayed=len(requests))
        live.unsaved_s = seconds  # the next crash would repeat it again
        live.resident_in = here

    async def _start(self, run: Run) -> None:
        if run.snapshot_folder is None:
            await self._device.backend.create(run.id, adapter_spec(run.lora))
        else:
            folder = self._storage.path(run.snapshot_folder)
            await self._device.backend.load(run.id, folder, "snapshot")

    async def _replay(self, run: Run, request: Request, here: Residence) -> float:
        """Do a request again; the seconds it took."""
        operation = await asyncio.to_thread(decode, request)
        if isinstance(operation, OptimStep):
            return await self._repeat(request, operation, here)
        assert isinstance(operation, ForwardBackward)
        operation = await with_loss(self._db, operation, run.session_id)
        return sum(
            [
                await self._repeat(request, part, here)
                for part in parts(operation, self._token_budget)
            ]
        )

    async def _repeat(
        self, request: Request, call: ForwardBackward | OptimStep, here: Residence
    ) -> float:
        async with self._replaying, self._device.turn() as now:
            if now != here:
                raise Lost("it was started again while a run was restored")
            began = time.perf_counter()
            if isinstance(call, OptimStep):
                [result] = await self._device.backend.optim_step([call])
            else:
                [result] = await self._device.backend.forward_backward([call])
            seconds = time.perf_counter() - began
        if isinstance(result, Failure):
            # It was done before: going on would be with other weights.
            raise BackendError(f"request {request.id} cannot be repeated: {result.message}")
        return seconds
