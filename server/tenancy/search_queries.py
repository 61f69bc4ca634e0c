"""What a search of sessions asks the database."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from sqlalchemy import BigInteger, and_, cast, false, func, or_, select
from sqlalchemy.ext.asyncio import AsyncSession

from server.core.ids import SessionId, TenantId
from server.core.records import Session, SessionStatus
from server.store.rows import CheckpointRow, RunRow, SessionRow, value


class Position(NamedTuple):
    """The session that a page ended with."""

    created_at: float
    session: SessionId


class StatusIs(NamedTuple):
    status: SessionStatus | None
    """None is a status that no session has."""
    reasons: Sequence[str] | None = None


class Held(NamedTuple):
    """The checkpoints that came out of a session."""

    count: int = 0
    size_bytes: int = 0


def conditions(
    *,
    owner: TenantId,
    projects: Sequence[str] | None,
    session: str | None,
    statuses: Sequence[StatusIs] | None,
) -> list[Any]:
    where: list[Any] = [SessionRow.owner == owner]
    if projects is not None:
        where.append(SessionRow.project.in_(projects))
    if session is not None:
        where.append(SessionRow.id == session)
    if statuses is not None:
        where.append(or_(*map(_status, statuses)))
    return where


async def exact(db: AsyncSession, owner: TenantId, position: Position) -> Position:
    """The position with the time as it is stored: on its way through a client it was rounded."""
    query = select(SessionRow.created_at).where(
        SessionRow.id == position.session, SessionRow.owner == owner
    )
    created_at = await db.scalar(query)
    return position if created_at is None else Position(created_at, position.session)


async def after(
    db: AsyncSession, where: list[Any], position: Position | None, limit: int
) -> list[Session]:
    """The next sessions, newest first."""
    query = select(SessionRow).where(*where)
    if position is not None:
        earlier = SessionRow.created_at < position.created_at
        same_time = SessionRow.created_at == position.created_at
        query = query.where(or_(earlier, and_(same_time, SessionRow.id < position.session)))
    query = query.order_by(SessionRow.created_at.desc(), SessionRow.id.desc()).limit(limit)
    return [value(Session, row) for row in await db.scalars(query)]


async def held_by(
    db: AsyncSession, sessions: Sequence[SessionId], now: float
) -> dict[SessionId, Held]:
    """The checkpoints of sessions that have any which has not expired, in one query."""
    query = (
        # PostgreSQL adds big integers up to decimals.
        select(
            RunRow.session_id, func.count(), cast(func.sum(CheckpointRow.size_bytes), BigInteger)
        )
        .join(CheckpointRow, CheckpointRow.run_id == RunRow.id)
        .where(RunRow.session_id.in_(sessions))
        .where(CheckpointRow.expires_at.is_(None) | (CheckpointRow.expires_at > now))
        .group_by(RunRow.session_id)
    )
    rows: Any = await db.execute(query)
    return {SessionId(id_): Held(count, size) for id_, count, size in rows if id_ is not None}


def _status(one: StatusIs) -> Any:
    if one.status is None:
        return false()
    is_it = SessionRow.status == one.status
    return is_it if one.reasons is None else is_it & SessionRow.finish_reason.in_(one.reasons)
