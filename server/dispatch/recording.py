"""Recording: outcomes, and all that must become visible with them, in one commit a run."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence

import structlog
from sqlalchemy.exc import SQLAlchemyError

from server.checkpoints.service import Checkpoints
from server.dispatch.snapshots import Snapshot, by_run
from server.runs.execution import Executed
from server.runs.registry import LiveRun, Registry
from server.store.database import AsyncSession
from server.store.ledger import Ledger, Outcome

log = structlog.get_logger()


class Recorder:
    def __init__(self, registry: Registry, ledger: Ledger, checkpoints: Checkpoints) -> None:
        self._registry = registry
        self._ledger = ledger
        self._checkpoints = checkpoints
        self._commits: set[asyncio.Task[None]] = set()

    async def record(
        self, executed: Sequence[Executed], snapshots: Mapping[LiveRun, Snapshot] | None = None
    ) -> None:
        """Commit while the next tick computes, unless that must see it."""
        snapshots = snapshots or {}
        grouped = by_run(executed, self._registry)
        for live, ones in grouped.items():
            for one in ones:
                self._settle(live, one)
        if snapshots:  # they include what is being recorded
            await self.recorded()
        tasks = [
            asyncio.create_task(self._commit(live, ones, snapshots.get(live)))
            for live, ones in grouped.items()
        ]
        for task in tasks:
            self._commits.add(task)
            task.add_done_callback(self._commits.discard)
        if snapshots or any(one.after is not None for one in executed):
            await asyncio.gather(*tasks)

    async def recorded(self) -> None:
        """Until what was executed is on disk."""
        if self._commits:
            await asyncio.wait(self._commits)

    def _settle(self, live: LiveRun, one: Executed) -> None:
        """What those who come next must know at once."""
        self._registry.finish(one.job)
        if one.job.seq == 0:
            live.creation_error = one.outcome.error
        live.executed_seq = max(live.executed_seq, one.job.seq)

    async def _commit(
        self, live: LiveRun, executed: Sequence[Executed], snapshot: Snapshot | None
    ) -> None:
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
            live.resident_in = None
            why = f"its outcome could not be stored: {type(error).__name__}"
            failed = Outcome(error=why, error_category="server")
            await self._ledger.finish_all([(request, failed) for request in requests])
            return
        if snapshot is not None:
            snapshot.adopt(self._checkpoints)
        for one in executed:
            if one.after is not None:
                one.after()
