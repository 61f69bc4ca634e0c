"""The audit log, as its readers ask for it: by day."""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, date, datetime, time

from server.audit import queries
from server.audit.events import Event
from server.core.ids import TenantId
from server.store.database import Database

DAY_S = 24 * 3600


class Audit:
    def __init__(self, db: Database, clock: Callable[[], float]) -> None:
        self._db = db
        self._clock = clock

    async def record(self, event: Event) -> None:
        """For what changes nothing else in the database."""
        await self._db.write(lambda db: queries.add(db, event))

    async def of_day(self, tenant: TenantId, day: date | None, resource: str | None) -> list[Event]:
        """A tenant's events of one day in UTC, by default today, oldest first."""
        day = day or datetime.fromtimestamp(self._clock(), UTC).date()
        since = datetime.combine(day, time(), UTC).timestamp()
        before = since + DAY_S
        return await self._db.read(lambda db: queries.between(db, tenant, since, before, resource))
