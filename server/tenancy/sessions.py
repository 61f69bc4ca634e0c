"""Sessions: opened by a client, kept alive by heartbeats, finished or expired."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from pydantic import Field

from server.audit import queries as audit_queries
from server.audit.events import of_assignment
from server.core.errors import Gone, NotFound
from server.core.ids import SessionId, new_session_id
from server.core.recent import Recent
from server.core.records import Session, SessionStatus, Tenant
from server.store.database import AsyncSession, Database
from server.tenancy import queries
from server.wire.json_shapes import WireModel


class CreateSession(WireModel):
    tags: list[str] = Field(default_factory=list)
    user_metadata: dict[str, Any] | None = None
    sdk_version: str = "unknown"
    project_id: str | None = None
    display_name: str | None = None


class Sessions:
    """Whether a session is over is kept in memory too: every request asks."""

    def __init__(self, db: Database, clock: Callable[[], float]) -> None:
        self._db = db
        self._clock = clock
        self._known: Recent[SessionId, Session] = Recent()

    async def create(
        self, tenant: Tenant, body: CreateSession, idempotency_key: str | None
    ) -> Session:
        now = self._clock()
        session = Session(
            id=new_session_id(),
            owner=tenant.id,
            project=body.project_id or tenant.project,
            tags=body.tags,
            user_metadata=body.user_metadata or {},
            sdk_version=body.sdk_version[:64],
            display_name=body.display_name,
            created_at=now,
            last_heartbeat_at=now,
        )
        stored = await self._db.write(lambda db: queries.add_session(db, session, idempotency_key))
        self._known.put(stored.id, stored)
        return stored

    async def get(self, tenant: Tenant, session: SessionId) -> Session:
        """Raises NotFound for an unknown or foreign id."""
        found = self._known.get(session) or await self._read(session)
        if found is None or found.owner != tenant.id:
            raise NotFound(f"session {session[:100]!r} does not exist")
        return found

    async def open(self, tenant: Tenant, session: SessionId) -> Session:
        """The session, if it may still start new work. Raises NotFound, or Gone when its client
        has finished it. One that had gone silent is back: its runs are on disk, nothing is lost.
        """
        found = await self.get(tenant, session)
        if found.status is SessionStatus.FINISHED:
            raise Gone(f"session {session} was finished by its client; create a new one")
        if found.status is SessionStatus.EXPIRED:
            await self.heartbeat(tenant, session)
        return found

    async def heartbeat(self, tenant: Tenant, session: SessionId) -> None:
        """Raises Gone when the client has finished the session: the SDK then stops beating."""
        await self.get(tenant, session)
        alive = await self._change_unfinished(
            session, last_heartbeat_at=self._clock(), status=SessionStatus.ACTIVE
        )
        if not alive:
            raise Gone(f"session {session} was finished by its client")

    async def finish(
        self, tenant: Tenant, session: SessionId, reason: str, detail: str | None
    ) -> None:
        """The first reason stands; repeating is harmless."""
        await self.get(tenant, session)
        await self._change_unfinished(
            session, status=SessionStatus.FINISHED, finish_reason=reason, finish_detail=detail
        )

    async def expire_silent(self, timeout_s: float) -> list[SessionId]:
        """End the sessions whose clients are gone; returns them."""
        since = self._clock() - timeout_s
        silent = await self._db.write(lambda db: queries.expire_silent(db, since))
        for session in silent:
            self._known.drop(session)
        return silent

    async def page(self, tenant: Tenant, limit: int, offset: int) -> list[Session]:
        return await self._db.read(lambda db: queries.page_sessions(db, tenant.id, limit, offset))

    async def assign_project(self, tenant: Tenant, session: SessionId, project: str) -> None:
        """Move it, its runs and their checkpoints."""
        before = (await self.get(tenant, session)).project
        event = of_assignment(tenant.id, session, before, project, self._clock())

        async def work(db: AsyncSession) -> None:
            await queries.assign_project(db, session, project)
            await audit_queries.add(db, event)

        await self._db.write(work)
        self._known.drop(session)

    async def _read(self, session: SessionId) -> Session | None:
        found = await self._db.read(lambda db: queries.find_session(db, session))
        if known := self._known.get(session):  # changed while it was read
            return known
        if found is not None:
            self._known.put(session, found)
        return found

    async def _change_unfinished(self, session: SessionId, **values: Any) -> bool:
        """Whether it was changed: not when its client has finished it."""

        async def work(db: AsyncSession) -> tuple[Session | None, bool]:
            return await queries.change_unfinished(db, session, **values)

        found, changed = await self._db.write(work)
        if found is not None:
            self._known.put(session, found)
        return changed
