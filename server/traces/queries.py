"""What the service asks the database about the requests of a session."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import dataclass, fields
from typing import Any

from sqlalchemy import func, or_, select
from sqlalchemy.ext.asyncio import AsyncSession

from server.core.ids import SessionId
from server.core.requests import Kind, State
from server.store.rows import RequestRow, RunRow, SamplingSessionRow

_READ_AT_ONCE = 1000


@dataclass(frozen=True, slots=True, kw_only=True)
class Traced:
    """A request without what was asked or answered: a trace tells when, not what."""

    id: str
    kind: Kind
    source: str
    """The run or sampling session it was for."""
    seq: int
    tokens: int
    state: State
    created_at: float
    started_at: float | None
    finished_at: float | None
    error_category: str | None


_FACTS = [field.name for field in fields(Traced)]


async def version(db: AsyncSession, session: SessionId) -> str:
    """Different whenever the session has another request, or another result."""
    query = select(func.count(), func.count(RequestRow.finished_at)).where(_of(session))
    submitted, finished = (await db.execute(query)).one()
    return f"{submitted}-{finished}"


async def in_order(db: AsyncSession, session: SessionId, moment: str) -> AsyncIterator[Traced]:
    """The session's requests for which `moment` ("created_at" or "started_at") has come, in the
    order in which it came."""
    at = getattr(RequestRow, moment)
    source = func.coalesce(RequestRow.run_id, RequestRow.sampling_session_id)
    facts = [source if name == "source" else getattr(RequestRow, name) for name in _FACTS]
    query = (
        select(*facts)
        .where(_of(session), at.is_not(None))
        .order_by(at, RequestRow.id)
        .execution_options(yield_per=_READ_AT_ONCE)
    )
    async for row in await db.stream(query):
        values: dict[str, Any] = dict(zip(_FACTS, row, strict=True))
        kind, state = Kind(values.pop("kind")), State(values.pop("state"))
        yield Traced(kind=kind, state=state, **values)


def _of(session: SessionId) -> Any:
    runs = select(RunRow.id).where(RunRow.session_id == session)
    samplers = select(SamplingSessionRow.id).where(SamplingSessionRow.session_id == session)
    return or_(RequestRow.run_id.in_(runs), RequestRow.sampling_session_id.in_(samplers))
