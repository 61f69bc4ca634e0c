"""Searching sessions: every filter of the SDK's `search_sessions`, newest first, by cursor.

What the database can decide is asked of it; names and metadata, which are text of any script,
are compared here.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Annotated, Literal

from pydantic import Field

from server.core.errors import BadInput
from server.core.ids import SessionId, user_urn
from server.core.limits import text_metadata
from server.core.records import Session, SessionStatus, Tenant
from server.store.database import AsyncSession, Database
from server.tenancy import search_queries
from server.tenancy.search_queries import Held, Position
from server.wire.json_shapes import WireModel

_SCANNED_AT_ONCE = 500


class Owner(WireModel):
    """The tenants of a server see nothing of each other, so `accessible` is `own`."""

    type: Literal["own", "accessible", "user"] = "own"
    owner_urns: Annotated[list[str], Field(min_length=1, max_length=10)] | None = None


class StatusQuery(WireModel):
    type: Literal["active", "cancelled", "failed", "client_finished"]
    reasons: (
        Annotated[list[Literal["success", "errored", "interrupted"]], Field(min_length=1)] | None
    ) = None


class Cursor(WireModel):
    last_created_at: str
    last_session_id: str


class SearchSessions(WireModel):
    session_id: str | None = None
    project_ids: Annotated[list[str], Field(max_length=1000)] | None = None
    user_metadata: dict[str, str] = Field(default_factory=dict)
    display_name: Annotated[str, Field(min_length=1)] | None = None
    owner: Owner = Owner()
    statuses: Annotated[list[StatusQuery], Field(min_length=1)] | None = None
    limit: Annotated[int, Field(ge=1, le=200)] = 50
    cursor: Cursor | None = None


@dataclass(frozen=True, slots=True)
class Found:
    session: Session
    held: Held


class SessionSearch:
    def __init__(self, db: Database, clock: Callable[[], float]) -> None:
        self._db = db
        self._clock = clock

    async def page(self, tenant: Tenant, query: SearchSessions) -> tuple[list[Found], bool]:
        """The sessions of the page, and whether there are more. Raises BadInput."""
        position = None if query.cursor is None else _position(query.cursor)
        if not _asks_for(query.owner, tenant):
            return [], False

        async def read(db: AsyncSession) -> tuple[list[Found], bool]:
            sessions = await self._scan(db, tenant, query, position)
            page, more = sessions[: query.limit], len(sessions) > query.limit
            held = await search_queries.held_by(db, [session.id for session in page], self._clock())
            return [Found(session, held.get(session.id, Held())) for session in page], more

        return await self._db.read(read)

    async def _scan(
        self, db: AsyncSession, tenant: Tenant, query: SearchSessions, position: Position | None
    ) -> list[Session]:
        """One session more than the page holds, if there is one."""
        where = search_queries.conditions(
            owner=tenant.id,
            projects=query.project_ids,
            # With a name beside it, an id is no condition: either may match.
            session=query.session_id if query.display_name is None else None,
            statuses=None if query.statuses is None else [_stored(one) for one in query.statuses],
        )
        if position is not None:
            position = await search_queries.exact(db, tenant.id, position)
        found: list[Session] = []
        while len(found) <= query.limit:
            rows = await search_queries.after(db, where, position, _SCANNED_AT_ONCE)
            found += [session for session in rows if matches(session, query)]
            if len(rows) < _SCANNED_AT_ONCE:
                break
            position = Position(rows[-1].created_at, rows[-1].id)
        return found[: query.limit + 1]


def matches(session: Session, query: SearchSessions) -> bool:
    """Whether a session's metadata and name are what the query asks for."""
    written = text_metadata(session.user_metadata)
    if any(written.get(key) != value for key, value in query.user_metadata.items()):
        return False
    if query.display_name is None or query.session_id == session.id:
        return True
    name = (session.display_name or "").casefold()
    return all(word in name for word in query.display_name.casefold().split())


def cursor_after(session: Session) -> dict[str, str]:
    created_at = datetime.fromtimestamp(session.created_at, UTC)
    return {"last_created_at": created_at.isoformat(), "last_session_id": session.id}


def _position(cursor: Cursor) -> Position:
    try:
        created_at = datetime.fromisoformat(cursor.last_created_at)
    except ValueError:
        created_at = None
    if created_at is None or created_at.tzinfo is None:
        raise BadInput(
            f"cursor.last_created_at is {cursor.last_created_at[:40]!r}, "
            "which is not a time with a time zone"
        )
    return Position(created_at.timestamp(), SessionId(cursor.last_session_id))


def _asks_for(owner: Owner, tenant: Tenant) -> bool:
    if owner.type != "user":
        return True
    if owner.owner_urns is None:
        raise BadInput("owner.owner_urns: is missing")
    return user_urn(tenant.id) in owner.owner_urns


def _stored(query: StatusQuery) -> search_queries.StatusIs:
    """Nothing here cancels a session or fails it as a whole, so nothing has those."""
    match query.type:
        case "active":
            return search_queries.StatusIs(SessionStatus.ACTIVE)
        case "client_finished":
            return search_queries.StatusIs(SessionStatus.FINISHED, query.reasons)
        case "cancelled" | "failed":
            return search_queries.StatusIs(None)
