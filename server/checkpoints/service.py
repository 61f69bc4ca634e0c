"""Checkpoints: what is saved under a name, who may read it, and how long it stays."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Set
from dataclasses import replace
from typing import Any

from server.audit import queries as audit_queries
from server.audit.events import Event, of_checkpoint
from server.checkpoints import queries
from server.checkpoints.storage import Storage
from server.core.errors import NotFound
from server.core.ids import RunId, TenantId
from server.core.limits import check_ttl
from server.core.paths import CheckpointKind, CheckpointPath
from server.core.records import Checkpoint, Run
from server.store.database import AsyncSession, Database

RETIREMENT_S = 60.0
"""How long a folder stays after nobody can ask for it any more: whoever was about to read it
has read it by then, or says that it is in use."""


class Checkpoints:
    def __init__(self, db: Database, storage: Storage, clock: Callable[[], float]) -> None:
        self._db = db
        self._clock = clock
        self._retired: dict[str, float] = {}
        self.storage = storage

    async def find(self, path: CheckpointPath) -> Checkpoint | None:
        """What stands under a path now; an expired checkpoint does not."""
        found = await self._db.read(lambda db: queries.find(db, path))
        if found is None or found.expires_at is None or found.expires_at > self._clock():
            return found
        return None

    async def readable(self, tenant: TenantId, path: CheckpointPath) -> Checkpoint:
        """A checkpoint that is the tenant's own or published. Raises NotFound."""
        found = await self.find(path)
        if found is None or (found.owner != tenant and not found.public):
            raise NotFound(f"checkpoint {path} does not exist")
        return found

    async def owned(self, tenant: TenantId, path: CheckpointPath) -> Checkpoint:
        """A checkpoint that the tenant may change. Raises NotFound."""
        found = await self.readable(tenant, path)
        if found.owner != tenant:
            raise NotFound(f"checkpoint {path} does not exist")
        return found

    def describe(
        self,
        run: Run,
        path: CheckpointPath,
        *,
        folder: str,
        size_bytes: int,
        ttl_seconds: int | None,
        user_metadata: dict[str, str],
    ) -> Checkpoint:
        """The record of a folder that has just been written."""
        now = self._clock()
        return Checkpoint(
            run_id=path.run,
            kind=path.kind,
            name=path.name,
            owner=run.owner,
            project=run.project,
            base_model=run.base_model,
            lora=run.lora,
            folder=folder,
            size_bytes=size_bytes,
            created_at=now,
            expires_at=None if ttl_seconds is None else now + ttl_seconds,
            user_metadata=user_metadata,
            optimizer=run.optimizer,
        )

    async def of_run(self, run: RunId) -> list[Checkpoint]:
        return await self._db.read(lambda db: queries.of_run(db, run, self._clock()))

    async def newest(
        self, runs: Collection[RunId]
    ) -> dict[tuple[RunId, CheckpointKind], Checkpoint]:
        return await self._db.read(lambda db: queries.newest(db, runs, self._clock()))

    async def page(self, tenant: TenantId, limit: int, offset: int) -> tuple[list[Checkpoint], int]:
        now = self._clock()
        return await self._db.read(lambda db: queries.page(db, tenant, limit, offset, now))

    async def publish(self, tenant: TenantId, path: CheckpointPath, public: bool) -> None:
        """Let everybody who has the path read it, or no longer. Repeating is harmless."""
        found = await self.owned(tenant, path)
        if found.public != public:
            action = "published" if public else "unpublished"
            await self._change(of_checkpoint(action, found, self._clock()), path, public=public)

    async def set_ttl(
        self, tenant: TenantId, path: CheckpointPath, ttl_seconds: int | None
    ) -> None:
        """Let it expire that long from now; None keeps it for ever."""
        check_ttl(ttl_seconds)
        found = await self.owned(tenant, path)
        now = self._clock()
        expires_at = None if ttl_seconds is None else now + ttl_seconds
        event = of_checkpoint("ttl_changed", found, now, ttl_seconds=ttl_seconds)
        await self._change(event, path, expires_at=expires_at)

    async def delete(self, tenant: TenantId, path: CheckpointPath) -> None:
        found = await self.owned(tenant, path)
        await self._remove(found)

    async def copy(self, source: Checkpoint, target: Run, ttl_seconds: int | None) -> Checkpoint:
        """Put a checkpoint's files under another run, as its owner's own. Repeating is
        harmless."""
        check_ttl(ttl_seconds)
        if standing := await self.find(replace(source.path, run=target.id)):
            return standing
        folder = await asyncio.to_thread(self.storage.copy, source.folder)
        now = self._clock()
        copied = replace(
            source,
            run_id=target.id,
            owner=target.owner,
            project=target.project,
            folder=folder,
            public=False,
            created_at=now,
            expires_at=None if ttl_seconds is None else now + ttl_seconds,
        )
        event = of_checkpoint("copied", copied, now, source_path=str(source.path))

        async def work(db: AsyncSession) -> None:
            await queries.put(db, copied)
            await audit_queries.add(db, event)

        await self._db.write(work)
        return copied

    async def store(self, db: AsyncSession, checkpoint: Checkpoint) -> None:
        """Put a checkpoint that was just saved under its name, within the caller's commit."""
        await queries.put(db, checkpoint)
        at, size = checkpoint.created_at, checkpoint.size_bytes
        await audit_queries.add(db, of_checkpoint("created", checkpoint, at, size_bytes=size))

    async def remove_expired(self) -> int:
        """Carry out the lifetimes that are over; says how many."""
        now = self._clock()
        expired = await self._db.read(lambda db: queries.expired(db, now))
        return sum([await self._remove(checkpoint, expired_by=now) for checkpoint in expired])

    async def check_stands(self, folder: str) -> None:
        """Raises NotFound unless a checkpoint lies in the folder: links to it outlive it."""
        if not await self._db.read(lambda db: queries.stands_in(db, folder, self._clock())):
            raise NotFound("the checkpoint behind this link does not exist any more")

    def retire(self, folder: str | None) -> None:
        """No row names this folder any more. It is removed a while later, or by the next start:
        a sample or a load may be reading it."""
        if folder is not None:
            self._retired[folder] = self._clock()

    async def remove_retired(self, in_use: Set[str]) -> int:
        """Give back the space of folders retired a while ago; says of how many.

        `in_use` holds folders, as `storage.path` names them, that are still read."""
        before = self._clock() - RETIREMENT_S
        over = [
            folder
            for folder, since in self._retired.items()
            if since <= before and self.storage.path(folder) not in in_use
        ]
        for folder in over:
            await asyncio.to_thread(self.storage.remove, folder)
            del self._retired[folder]
        return len(over)

    async def _change(self, event: Event, path: CheckpointPath, **values: Any) -> None:
        async def work(db: AsyncSession) -> None:
            await queries.change(db, path, **values)
            await audit_queries.add(db, event)

        await self._db.write(work)

    async def _remove(self, checkpoint: Checkpoint, expired_by: float | None = None) -> bool:
        action = "deleted" if expired_by is None else "expired"
        event = of_checkpoint(action, checkpoint, self._clock())

        async def work(db: AsyncSession) -> bool:
            there = await queries.remove(db, checkpoint, expired_by)
            if there:
                await audit_queries.add(db, event)
            return there

        removed = await self._db.write(work)
        if removed:
            self.retire(checkpoint.folder)
        return removed
