"""What the service asks the database about sampling sessions."""

from __future__ import annotations

from sqlalchemy import insert, select, update
from sqlalchemy.ext.asyncio import AsyncSession

from server.core.ids import SamplingSessionId, SessionId
from server.core.records import SamplerKind, SamplingSession, SessionStatus
from server.store.rows import SamplingSessionRow, SessionRow, columns, value


async def add(db: AsyncSession, sampler: SamplingSession) -> SamplingSession:
    """Store a sampling session, or return the one that has its id."""
    if existing := await find(db, sampler.id):
        return existing
    await db.execute(insert(SamplingSessionRow).values(columns(sampler)))
    return sampler


async def find(db: AsyncSession, sampler: SamplingSessionId) -> SamplingSession | None:
    row = await db.get(SamplingSessionRow, sampler)
    return None if row is None else value(SamplingSession, row)


async def of_session(db: AsyncSession, session: SessionId) -> list[SamplingSession]:
    query = select(SamplingSessionRow).where(SamplingSessionRow.session_id == session)
    rows = await db.scalars(query.order_by(SamplingSessionRow.created_at))
    return [value(SamplingSession, row) for row in rows]


async def next_clone(db: AsyncSession, sampler: SamplingSessionId) -> int:
    """Number one more copy of the client, from 1."""
    await db.execute(
        update(SamplingSessionRow)
        .where(SamplingSessionRow.id == sampler)
        .values(clones=SamplingSessionRow.clones + 1)
    )
    query = select(SamplingSessionRow.clones).where(SamplingSessionRow.id == sampler)
    return (await db.execute(query)).scalar_one()


async def abandoned(db: AsyncSession, silent_since: float) -> list[SamplingSession]:
    """Samplers without a name whose client has finished its session, or fell silent that long
    ago, and whose weights are still kept."""
    over = (SessionRow.status == SessionStatus.FINISHED) | (
        (SessionRow.status == SessionStatus.EXPIRED) & (SessionRow.last_heartbeat_at < silent_since)
    )
    query = (
        select(SamplingSessionRow)
        .join(SessionRow, SessionRow.id == SamplingSessionRow.session_id)
        .where(SamplingSessionRow.kind == SamplerKind.SNAPSHOT, over)
        .where(SamplingSessionRow.folder.is_not(None))
    )
    return [value(SamplingSession, row) for row in await db.scalars(query)]


async def drop_folder(db: AsyncSession, sampler: SamplingSessionId) -> None:
    await db.execute(
        update(SamplingSessionRow).where(SamplingSessionRow.id == sampler).values(folder=None)
    )


async def folders(db: AsyncSession) -> set[str]:
    """Of the samplers without a name; those on a checkpoint have its folder while it lives."""
    query = select(SamplingSessionRow.folder).where(
        SamplingSessionRow.kind == SamplerKind.SNAPSHOT, SamplingSessionRow.folder.is_not(None)
    )
    return {folder for folder in await db.scalars(query) if folder}
