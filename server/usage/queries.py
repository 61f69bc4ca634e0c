"""What the service asks the database about usage."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from sqlalchemy import BigInteger, ColumnElement, Insert, bindparam, cast, func, insert, select
from sqlalchemy.ext.asyncio import AsyncSession

from server.core.ids import SessionId, TenantId
from server.core.records import Request
from server.core.usage import Counts
from server.store.history_rows import UsageRow
from server.store.rows import CheckpointRow, RunRow, SamplingSessionRow, SessionRow

_COUNTS = ("trained", "prefilled", "prefilled_cached", "sampled", "checkpoints")


@dataclass(frozen=True, slots=True, kw_only=True)
class Bucket:
    """What one session used of one base model within an hour."""

    hour: int
    base_model: str
    session_id: SessionId | None
    project: str | None
    """Of the session as it is now."""
    counts: Counts


@dataclass(frozen=True, slots=True, kw_only=True)
class Stored:
    """The checkpoints of a tenant in one project."""

    project: str
    count: int
    size_bytes: int


def _adding(source: Any) -> Insert:
    """Stores usage; the rows of `source` know which session and base model it was for."""
    table: Any = UsageRow.__table__
    given = ("request_id", "kind", "owner", "hour", *_COUNTS)
    values: dict[str, Any] = {
        **{name: bindparam(name, type_=table.c[name].type) for name in given},
        "session_id": source.session_id,
        "base_model": source.base_model,
    }
    found = select(*values.values()).where(source.id == bindparam("source_id"))
    return insert(table).from_select(list(values), found)


# Built once, since most requests are counted: that takes longer than to run them.
_ADD_FOR_RUN = _adding(RunRow)
_ADD_FOR_SAMPLER = _adding(SamplingSessionRow)


async def add(db: AsyncSession, request: Request, counts: Counts, hour: int) -> None:
    """Store what a request used."""
    of_run = request.run_id is not None
    given = {
        "request_id": request.id,
        "kind": request.kind.value,
        "owner": request.owner,
        "hour": hour,
        "source_id": request.run_id if of_run else request.sampling_session_id,
        **asdict(counts),
    }
    await db.execute(_ADD_FOR_RUN if of_run else _ADD_FOR_SAMPLER, given)


async def buckets(db: AsyncSession, owner: TenantId, since: int, before: int) -> list[Bucket]:
    """A tenant's usage by hour, base model and session, from one hour to before another."""
    keys = (UsageRow.hour, UsageRow.base_model, UsageRow.session_id, SessionRow.project)
    sums = (_total(getattr(UsageRow, name)).label(name) for name in _COUNTS)
    query = (
        select(*keys, *sums)
        .outerjoin(SessionRow, SessionRow.id == UsageRow.session_id)
        .where(UsageRow.owner == owner, UsageRow.hour >= since, UsageRow.hour < before)
        .group_by(*keys)
        .order_by(UsageRow.hour)
    )
    return [_bucket(row) for row in await db.execute(query)]


def _total(column: Any) -> ColumnElement[int]:
    # PostgreSQL adds big integers up to decimals.
    return cast(func.sum(column), BigInteger)


def _bucket(row: Any) -> Bucket:
    counts = Counts(**{name: getattr(row, name) for name in _COUNTS})
    return Bucket(
        hour=row.hour,
        base_model=row.base_model,
        session_id=row.session_id,
        project=row.project,
        counts=counts,
    )


async def metadata(
    db: AsyncSession, owner: TenantId, since: int, before: int
) -> dict[SessionId, dict[str, Any]]:
    """What clients have written on the sessions with usage in those hours."""
    used = select(UsageRow.session_id).where(
        UsageRow.owner == owner, UsageRow.hour >= since, UsageRow.hour < before
    )
    query = select(SessionRow.id, SessionRow.user_metadata).where(SessionRow.id.in_(used))
    return {SessionId(id_): found for id_, found in await db.execute(query)}


async def stored(
    db: AsyncSession, owner: TenantId, project: str | None, now: float
) -> list[Stored]:
    """A tenant's checkpoints that have not expired, by project."""
    # A checkpoint moves with its session, as the runs do.
    place = func.coalesce(SessionRow.project, CheckpointRow.project).label("place")
    query = (
        select(place, func.count(), _total(CheckpointRow.size_bytes))
        .join(RunRow, RunRow.id == CheckpointRow.run_id)
        .outerjoin(SessionRow, SessionRow.id == RunRow.session_id)
        .where(CheckpointRow.owner == owner)
        .where(CheckpointRow.expires_at.is_(None) | (CheckpointRow.expires_at > now))
        .group_by(place)
        .order_by(place)
    )
    if project is not None:
        query = query.where(place == project)
    return [
        Stored(project=where, count=count, size_bytes=size)
        for where, count, size in await db.execute(query)
    ]
