"""What the service asks the database about the audit log. An entry is added by whoever makes the
change, in the commit of that change."""

from __future__ import annotations

from sqlalchemy import insert, select
from sqlalchemy.ext.asyncio import AsyncSession

from server.audit.events import Event, Resource
from server.core.ids import TenantId
from server.store.history_rows import AuditRow

MAX_ENTRIES = 10_000


async def add(db: AsyncSession, event: Event) -> None:
    await db.execute(
        insert(AuditRow).values(
            at=event.at,
            owner=event.owner,
            resource=event.resource.value,
            event=event.event,
            details=event.details,
        )
    )


async def between(
    db: AsyncSession, owner: TenantId, since: float, before: float, resource: str | None
) -> list[Event]:
    """A tenant's entries in that time, oldest first; the latest, if they are very many."""
    query = select(AuditRow).where(
        AuditRow.owner == owner, AuditRow.at >= since, AuditRow.at < before
    )
    if resource is not None:
        query = query.where(AuditRow.resource == resource)
    query = query.order_by(AuditRow.at.desc(), AuditRow.id.desc()).limit(MAX_ENTRIES)
    newest_first = (await db.scalars(query)).all()
    return [
        Event(
            at=row.at,
            owner=TenantId(row.owner),
            resource=Resource(row.resource),
            event=row.event,
            details=row.details,
        )
        for row in reversed(newest_first)
    ]
