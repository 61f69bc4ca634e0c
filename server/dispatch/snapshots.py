"""Snapshots: a run's whole state in a folder, which a restore starts from."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass, replace

import structlog
from sqlalchemy.exc import SQLAlchemyError

from backends.contract import BackendError
from server.checkpoints.service import Checkpoints
from server.core.requests import REPLAYED_KINDS
from server.dispatch.device import Device, Lost
from server.runs import queries
from server.runs.execution import Executed
from server.runs.registry import LiveRun, Registry
from server.store import journal
from server.store.database import AsyncSession, Database

log = structlog.get_logger()


@dataclass(frozen=True, slots=True)
class Snapshot:
    """One that is written, and that no row names yet."""

    live: LiveRun
    folder: str
    seq: int
    """The state includes every request up to this one that has run."""

    async def put(self, db: AsyncSession) -> None:
        """From this commit on, a restore starts here."""
        run = self.live.run.id
        await queries.change(db, run, snapshot_seq=self.seq, snapshot_folder=self.folder)
        await journal.prune_payloads(db, run, self.seq)

    def adopt(self, checkpoints: Checkpoints) -> None:
        """It is committed: the one before it can go."""
        previous = self.live.run.snapshot_folder
        self.live.run = replace(self.live.run, snapshot_seq=self.seq, snapshot_folder=self.folder)
        self.live.unsaved_s = 0.0
        checkpoints.retire(previous)


class Snapshots:
    """`recorded` waits until what was executed is on disk."""

    def __init__(
        self,
        *,
        device: Device,
        registry: Registry,
        checkpoints: Checkpoints,
        db: Database,
        recorded: Callable[[], Awaitable[None]],
    ) -> None:
        self._device = device
        self._registry = registry
        self._checkpoints = checkpoints
        self._db = db
        self._recorded = recorded

    async def try_each(self, lives: Iterable[LiveRun]) -> None:
        """Without one the journal still leads to the run's state."""
        for live in lives:
            await self.attempt(live)

    async def attempt(self, live: LiveRun) -> bool:
        """Whether the run has a snapshot of its state now."""
        try:
            await self._take(live)
        except (BackendError, SQLAlchemyError, OSError) as error:
            log.warning("snapshot_failed", run=live.run.id, why=str(error))
            return False
        return True

    async def of_unrepeatable(self, executed: Sequence[Executed]) -> dict[LiveRun, Snapshot]:
        """Snapshots of the runs whose state no replay leads to, to be committed with the
        outcomes: a load, and a number that came after others had run without it. To be called in
        the turn that executed them."""
        snapshots: dict[LiveRun, Snapshot] = {}
        for live, ones in by_run(executed, self._registry).items():
            if any(_replaces(one, live) for one in ones):
                seq = max(live.executed_seq, *(one.job.seq for one in ones))
                snapshots[live] = await self._save(live, seq)
        return snapshots

    async def _take(self, live: LiveRun) -> None:
        """Save the run's state and make it the one that a restore starts from."""
        await self._recorded()
        async with self._device.turn() as here:
            if live.resident_in != here:
                raise Lost("the run is not in memory any more")
            snapshot = await self._save(live, live.executed_seq)
        await self._db.write(snapshot.put)
        snapshot.adopt(self._checkpoints)

    async def _save(self, live: LiveRun, seq: int) -> Snapshot:
        storage = self._checkpoints.storage
        snapshot = Snapshot(live, storage.new(), seq)
        await self._device.backend.save(live.run.id, storage.path(snapshot.folder), "snapshot")
        return snapshot


def by_run(executed: Iterable[Executed], registry: Registry) -> dict[LiveRun, list[Executed]]:
    """In the order they were executed in."""
    grouped: dict[LiveRun, list[Executed]] = {}
    for one in executed:
        grouped.setdefault(registry.known(one.job.run), []).append(one)
    return grouped


def _replaces(one: Executed, live: LiveRun) -> bool:
    late = one.job.kind in REPLAYED_KINDS and one.job.seq < live.executed_seq
    return one.outcome.error is None and (one.replaces_state or late)
