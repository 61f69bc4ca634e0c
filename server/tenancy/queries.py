"""What the service asks the database about API keys and sessions."""

from __future__ import annotations

from typing import Any

from sqlalchemy import func, insert, select, update
from sqlalchemy.ext.asyncio import AsyncSession

from server.core.ids import SessionId, TenantId
from server.core.records import Session, SessionStatus, Tenant
from server.store.rows import ApiKeyRow, CheckpointRow, RunRow, SessionRow, columns, value


async def tenant_of(db: AsyncSession, digest: str) -> Tenant | None:
    row = await db.get(ApiKeyRow, digest)
    if row is None or row.revoked_at is not None:
        return None
    return Tenant(id=TenantId(row.tenant), project=row.project, name=row.name)


async def add_key(db: AsyncSession, digest: str, tenant: Tenant, now: float) -> None:
    await db.execute(
        insert(ApiKeyRow).values(
            digest=digest,
            name=tenant.name,
            tenant=tenant.id,
            project=tenant.project,
            created_at=now,
        )
    )


async def revoke_keys(db: AsyncSession, name: str, now: float) -> int:
    result: Any = await db.execute(
        update(ApiKeyRow)
        .where(ApiKeyRow.name == name, ApiKeyRow.revoked_at.is_(None))
        .values(revoked_at=now)
    )
    return result.rowcount


async def revoke_key(db: AsyncSession, digest: str, now: float) -> None:
    await db.execute(
        update(ApiKeyRow)
        .where(ApiKeyRow.digest == digest, ApiKeyRow.revoked_at.is_(None))
        .values(revoked_at=now)
    )


async def holders(db: AsyncSession, name: str) -> list[Tenant]:
    """Whose the valid keys of that name are, one for each."""
    query = select(ApiKeyRow).where(ApiKeyRow.name == name, ApiKeyRow.revoked_at.is_(None))
    return [
        Tenant(id=TenantId(row.tenant), project=row.project, name=row.name)
        for row in await db.scalars(query)
    ]


async def list_keys(db: AsyncSession) -> list[tuple[str, str, str, float, float | None]]:
    """(name, tenant, project, created_at, revoked_at) of every key, oldest first."""
    query = select(ApiKeyRow).order_by(ApiKeyRow.created_at)
    return [
        (row.name, row.tenant, row.project, row.created_at, row.revoked_at)
        for row in await db.scalars(query)
    ]


async def any_keys(db: AsyncSession) -> bool:
    return bool(await db.scalar(select(func.count()).select_from(ApiKeyRow)))


async def add_session(db: AsyncSession, session: Session, idempotency_key: str | None) -> Session:
    """Store a session, or return the one this very request has made before."""
    if idempotency_key is not None:
        query = select(SessionRow).where(
            SessionRow.owner == session.owner, SessionRow.idempotency_key == idempotency_key
        )
        if (row := await db.scalar(query)) is not None:
            return value(Session, row)
    values = columns(session) | {"idempotency_key": idempotency_key}
    await db.execute(insert(SessionRow).values(values))
    return session


async def find_session(db: AsyncSession, session: SessionId) -> Session | None:
    row = await db.get(SessionRow, session)
    return None if row is None else value(Session, row)


async def assign_project(db: AsyncSession, session: SessionId, project: str) -> None:
    """Of a session, its runs and their checkpoints."""
    runs = select(RunRow.id).where(RunRow.session_id == session)
    for row, mine in (
        (SessionRow, SessionRow.id == session),
        (RunRow, RunRow.session_id == session),
        (CheckpointRow, CheckpointRow.run_id.in_(runs)),
    ):
        await db.execute(update(row).where(mine).values(project=project))


async def change_unfinished(
    db: AsyncSession, session: SessionId, **values: Any
) -> tuple[Session | None, bool]:
    """Change a session that its client has not finished; it as it is then, and whether it was
    changed. Decided here, since a heartbeat and the finish can cross."""
    changed: Any = await db.execute(
        update(SessionRow)
        .where(SessionRow.id == session, SessionRow.status != SessionStatus.FINISHED)
        .values(**values)
    )
    return await find_session(db, session), changed.rowcount == 1


async def page_sessions(
    db: AsyncSession, owner: TenantId, limit: int, offset: int
) -> list[Session]:
    """A tenant's sessions, newest first."""
    query = select(SessionRow).where(SessionRow.owner == owner)
    rows = await db.scalars(
        query.order_by(SessionRow.created_at.desc()).limit(limit).offset(offset)
    )
    return [value(Session, row) for row in rows]


async def expire_silent(db: AsyncSession, since: float) -> list[SessionId]:
    """End the active sessions whose last sign of life is older than `since`."""
    ended = await db.scalars(
        update(SessionRow)
        .where(SessionRow.status == SessionStatus.ACTIVE, SessionRow.last_heartbeat_at < since)
        .values(status=SessionStatus.EXPIRED)
        .returning(SessionRow.id)
    )
    return [SessionId(session) for session in ended]
