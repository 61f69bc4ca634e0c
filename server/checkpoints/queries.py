"""What the service asks the database about checkpoints."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from sqlalchemy import delete, func, insert, literal_column, select, update
from sqlalchemy.ext.asyncio import AsyncSession
from sqlalchemy.orm import aliased

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


async def remove(db: AsyncSession, checkpoint: Checkpoint, expired_by: float | None = None) -> bool:
    """Whether it was still there: a newer one under its path stays, and, with `expired_by`, one
    that was given a longer life in the meantime."""
    where = [*_is(checkpoint.path), CheckpointRow.folder == checkpoint.folder]
    if expired_by is not None:
        where.append(CheckpointRow.expires_at <= expired_by)
    done: Any = await db.execute(delete(CheckpointRow).where(*where))
    return done.rowcount == 1


async def of_run(db: AsyncSession, run: RunId, now: float) -> list[Checkpoint]:
    """The run's checkpoints that have not expired, newest first."""
    query = select(CheckpointRow).where(CheckpointRow.run_id == run, _alive(now))
    rows = await db.scalars(query.order_by(CheckpointRow.created_at.desc(), CheckpointRow.name))
    return [value(Checkpoint, row) for row in rows]


async def newest(
    db: AsyncSession, runs: Collection[RunId], now: float
) -> dict[tuple[RunId, CheckpointKind], Checkpoint]:
    """The newest checkpoint of each run and kind that has one, in one query for them all."""
    newest_first = CheckpointRow.created_at.desc(), CheckpointRow.name
    place = func.row_number().over(
        partition_by=(CheckpointRow.run_id, CheckpointRow.kind), order_by=newest_first
    )
    ranked = select(CheckpointRow, place.label("place")).where(
        CheckpointRow.run_id.in_(runs), _alive(now)
    )
    first = aliased(CheckpointRow, ranked.subquery())
    query = select(first).where(literal_column("place") == 1)
    found = [value(Checkpoint, row) for row in await db.scalars(query)]
    return {(checkpoint.run_id, checkpoint.kind): checkpoint for checkpoint in found}


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


async def stands_in(db: AsyncSession, folder: str, now: float) -> bool:
    """Whether a checkpoint that has not expired names this folder."""
    query = select(CheckpointRow.folder).where(CheckpointRow.folder == folder, _alive(now))
    return await db.scalar(query.limit(1)) is not None


async def folders(db: AsyncSession) -> set[str]:
    return set(await db.scalars(select(CheckpointRow.folder)))


def _alive(now: float) -> Any:
    return CheckpointRow.expires_at.is_(None) | (CheckpointRow.expires_at > now)
