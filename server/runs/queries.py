"""What the service asks the database about training runs."""

from __future__ import annotations

from typing import Any

from sqlalchemy import func, insert, select, update
from sqlalchemy.ext.asyncio import AsyncSession

from server.core.ids import RunId, SessionId, TenantId
from server.core.records import Run
from server.store.rows import RunRow, columns, value


async def add(db: AsyncSession, run: Run) -> Run:
    """Store a run, or return the one that has its id: a retried creation finds the first."""
    if existing := await find(db, run.id):
        return existing
    await db.execute(insert(RunRow).values(columns(run)))
    return run


async def find(db: AsyncSession, run: RunId) -> Run | None:
    row = await db.get(RunRow, run)
    return None if row is None else value(Run, row)


async def change(db: AsyncSession, run: RunId, **values: Any) -> None:
    await db.execute(update(RunRow).where(RunRow.id == run).values(**values))


async def of_session(db: AsyncSession, session: SessionId) -> list[Run]:
    query = select(RunRow).where(RunRow.session_id == session).order_by(RunRow.created_at)
    return [value(Run, row) for row in await db.scalars(query)]


async def page(
    db: AsyncSession, owner: TenantId, limit: int, offset: int, project: str | None = None
) -> tuple[list[Run], int]:
    """A tenant's runs, the latest used first, and how many there are in all."""
    where = [RunRow.owner == owner]
    if project is not None:
        where.append(RunRow.project == project)
    total = await db.scalar(select(func.count()).select_from(RunRow).where(*where)) or 0
    query = select(RunRow).where(*where).order_by(RunRow.last_request_at.desc(), RunRow.id)
    rows = await db.scalars(query.limit(limit).offset(offset))
    return [value(Run, row) for row in rows], total


async def with_snapshots(db: AsyncSession) -> list[Run]:
    """Runs whose state folders must be kept."""
    query = select(RunRow).where(
        RunRow.snapshot_folder.is_not(None) | RunRow.inflight_folder.is_not(None)
    )
    return [value(Run, row) for row in await db.scalars(query)]
