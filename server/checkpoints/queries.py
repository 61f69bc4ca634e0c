"""What the service asks the database about checkpoints."""

from __future__ import annotations

from typing import Any

from sqlalchemy import delete, func, insert, select, update
from sqlalchemy.ext.asyncio import AsyncSession

from server.core.ids import RunId, TenantId
from server.core.paths import CheckpointKind, CheckpointPath
from server.core.records import Checkpoint
from server.store.rows import CheckpointRow, columns, value


def _is(path: CheckpointPath) -> list[Any]:
    return [
        CheckpointRow.run_id == path.run,
        CheckpointRow.kind == path.kind.value,
        CheckpointRow.name == path.name,
    ]


async def find(db: AsyncSession, path: CheckpointPath) -> Checkpoint | None:
    row = await db.scalar(select(CheckpointRow).where(*_is(path)))
    return None if row is None else value(Checkpoint, row)


async def put(db: AsyncSession, checkpoint: Checkpoint) -> None:
    """Store a checkpoint in place of one that has its path."""
    await db.execute(delete(CheckpointRow).where(*_is(checkpoint.path)))
    await db.execute(insert(CheckpointRow).values(columns(checkpoint)))


async def change(db: AsyncSession, path: CheckpointPath, **values: Any) -> None:
    await db.execute(update(CheckpointRow).where(*_is(path)).values(**values))


async def remove(db: AsyncSession, path: CheckpointPath) -> None:
    await db.execute(delete(CheckpointRow).where(*_is(path)))


async def of_run(db: AsyncSession, run: RunId, now: float) -> list[Checkpoint]:
    """The run's checkpoints that have not expired, newest first."""
    query = select(CheckpointRow).where(CheckpointRow.run_id == run, _alive(now))
    rows = await db.scalars(query.order_by(CheckpointRow.created_at.desc(), CheckpointRow.name))
    return [value(Checkpoint, row) for row in rows]


async def newest(
    db: AsyncSession, run: RunId, kind: CheckpointKind, now: float
) -> Checkpoint | None:
    query = select(CheckpointRow).where(
        CheckpointRow.run_id == run, CheckpointRow.kind == kind.value, _alive(now)
    )
    row = await db.scalar(query.order_by(CheckpointRow.created_at.desc()).limit(1))
    return None if row is None else value(Checkpoint, row)


async def page(
    db: AsyncSession, owner: TenantId, limit: int, offset: int, now: float
) -> tuple[list[Checkpoint], int]:
    """A tenant's checkpoints, newest first, and how many there are in all."""
    where = [CheckpointRow.owner == owner, _alive(now)]
    total = await db.scalar(select(func.count()).select_from(CheckpointRow).where(*where)) or 0
    query = select(CheckpointRow).where(*where)
    rows = await db.scalars(
        query.order_by(CheckpointRow.created_at.desc(), CheckpointRow.name)
        .limit(limit)
        .offset(offset)
    )
    return [value(Checkpoint, row) for row in rows], total


async def expired(db: AsyncSession, now: float) -> list[Checkpoint]:
    rows = await db.scalars(select(CheckpointRow).where(CheckpointRow.expires_at <= now))
    return [value(Checkpoint, row) for row in rows]


async def folders(db: AsyncSession) -> set[str]:
    return set(await db.scalars(select(CheckpointRow.folder)))


def _alive(now: float) -> Any:
    return CheckpointRow.expires_at.is_(None) | (CheckpointRow.expires_at > now)
