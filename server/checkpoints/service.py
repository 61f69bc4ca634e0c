"""Checkpoints: what is saved under a name, who may read it, and how long it stays."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from server.checkpoints import queries
from server.checkpoints.storage import Storage
from server.core.errors import NotFound
from server.core.ids import RunId, TenantId
from server.core.limits import check_ttl
from server.core.paths import CheckpointKind, CheckpointPath
from server.core.records import Checkpoint, Run
from server.store.database import AsyncSession, Database


class Checkpoints:
    def __init__(self, db: Database, storage: Storage, clock: Callable[[], float]) -> None:
        self._db = db
        self._clock = clock
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
        )

    async def of_run(self, run: RunId) -> list[Checkpoint]:
        return await self._db.read(lambda db: queries.of_run(db, run, self._clock()))

    async def newest(self, run: RunId, kind: CheckpointKind) -> Checkpoint | None:
        return await self._db.read(lambda db: queries.newest(db, run, kind, self._clock()))

    async def page(self, tenant: TenantId, limit: int, offset: int) -> tuple[list[Checkpoint], int]:
        now = self._clock()
        return await self._db.read(lambda db: queries.page(db, tenant, limit, offset, now))

    async def publish(self, tenant: TenantId, path: CheckpointPath, public: bool) -> None:
        """Let everybody who has the path read it, or no longer. Repeating is harmless."""
        await self.owned(tenant, path)
        await self._db.write(lambda db: queries.change(db, path, public=public))

    async def set_ttl(
        self, tenant: TenantId, path: CheckpointPath, ttl_seconds: int | None
    ) -> None:
        """Let it expire that long from now; None keeps it for ever."""
        check_ttl(ttl_seconds)
        await self.owned(tenant, path)
        expires_at = None if ttl_seconds is None else self._clock() + ttl_seconds
        await self._db.write(lambda db: queries.change(db, path, expires_at=expires_at))

    async def delete(self, tenant: TenantId, path: CheckpointPath) -> None:
        found = await self.owned(tenant, path)
        await self._remove(found)

    async def copy(self, source: Checkpoint, target: Run, ttl_seconds: int | None) -> Checkpoint:
        """Put a checkpoint's files under another run, as its owner's own."""
        folder = self.storage.copy(source.folder)
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
        await self._db.write(lambda db: queries.put(db, copied))
        return copied

    async def remove_expired(self) -> int:
        """Carry out the lifetimes that are over; says how many."""
        expired = await self._db.read(lambda db: queries.expired(db, self._clock()))
        for checkpoint in expired:
            await self._remove(checkpoint)
        return len(expired)

    async def _remove(self, checkpoint: Checkpoint) -> None:
        async def work(db: AsyncSession) -> None:
            await queries.remove(db, checkpoint.path)

        await self._db.write(work)
        # After the commit: a crash in between leaves a folder without a name, which the next
        # start removes, and never a name without its folder.
        self.storage.remove(checkpoint.folder)
