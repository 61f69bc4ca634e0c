"""The journal: every request is here before it is acknowledged, every result before it is seen.

`(run, seq)` and `(sampling session, seq)` are unique through the request's id, which is made of
them: a re-sent submission finds the request that is there already.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from sqlalchemy import Select, bindparam, func, select, update
from sqlalchemy.dialects import postgresql, sqlite
from sqlalchemy.ext.asyncio import AsyncSession

from server.core.ids import CLONE_SIZE, RequestId, RunId, SamplingSessionId
from server.core.records import Request
from server.core.requests import REPLAYED_KINDS, State
from server.store.rows import RequestRow, columns, value

_TABLE: Any = RequestRow.__table__
# Every request passes these two. They are built once: that takes longer than to run them.
_APPEND: dict[str, Any] = {
    name: dialect.insert(_TABLE).on_conflict_do_nothing()
    for name, dialect in (("postgresql", postgresql), ("sqlite", sqlite))
}
_FINISH = update(_TABLE).where(
    _TABLE.c.id == bindparam("request_id"), _TABLE.c.state == State.WAITING
)


async def append(db: AsyncSession, request: Request) -> bool:
    """Store a request, unless one has its id; that is False."""
    done: Any = await db.execute(_APPEND[db.get_bind().dialect.name], columns(request))
    return done.rowcount == 1


async def find(db: AsyncSession, request: RequestId) -> Request | None:
    row = await db.get(RequestRow, request)
    return None if row is None else value(Request, row)


async def finish(db: AsyncSession, request: Request) -> bool:
    """Store the outcome of a waiting request; one that is over stays as it is, and that is
    False. The payload goes, unless the run may have to be played again."""
    values: dict[str, Any] = {
        "state": request.state,
        "started_at": request.started_at,
        "finished_at": request.finished_at,
        "finished_no": request.finished_no,
        "result": request.result,
        "result_type": request.result_type,
        "error": request.error,
        "error_category": request.error_category,
    }
    if request.state is not State.DONE or request.kind not in REPLAYED_KINDS:
        values["payload"] = None
    done: Any = await db.execute(_FINISH, {"request_id": request.id, **values})
    return done.rowcount == 1


async def unfinished(db: AsyncSession) -> list[Request]:
    """What a start of the server must carry on with, oldest first."""
    query = select(RequestRow).where(RequestRow.state == State.WAITING)
    return await _all(db, query.order_by(RequestRow.created_at, RequestRow.seq))


async def replayable(db: AsyncSession, run: RunId, after: int) -> list[Request]:
    """What changed the run's state since its snapshot, in order."""
    query = select(RequestRow).where(
        RequestRow.run_id == run, RequestRow.seq > after, RequestRow.state == State.DONE
    )
    query = query.where(RequestRow.kind.in_(REPLAYED_KINDS))
    return await _all(db, query.order_by(RequestRow.seq))


async def progress(db: AsyncSession, run: RunId) -> tuple[int, list[int]]:
    """The highest seq of a run that was done, or -1, and those after it that failed: one that
    was refused may be ahead of others that still wait."""
    mine = RequestRow.run_id == run
    done = await db.scalar(
        select(func.max(RequestRow.seq)).where(mine, RequestRow.state == State.DONE)
    )
    last = -1 if done is None else done
    query = select(RequestRow.seq).where(
        mine, RequestRow.state == State.FAILED, RequestRow.seq > last
    )
    return last, list(await db.scalars(query))


async def prune_payloads(db: AsyncSession, run: RunId, through: int) -> None:
    """A snapshot includes these requests: they will never be played again."""
    await db.execute(
        update(RequestRow)
        .where(RequestRow.run_id == run, RequestRow.seq <= through)
        .where(RequestRow.state != State.WAITING, RequestRow.payload.is_not(None))
        .values(payload=None)
    )


async def expire_results(db: AsyncSession, finished_since: float, finished_before: float) -> None:
    """Drop results that nobody will ask for any more. Two bounds, so that a repeated call does
    not look through all that ever was."""
    await db.execute(
        update(RequestRow)
        .where(RequestRow.finished_at >= finished_since, RequestRow.finished_at < finished_before)
        .where(RequestRow.result.is_not(None))
        .values(result=None, result_type=None)
    )


async def completions(
    db: AsyncSession, sampling_session: SamplingSessionId, clone: int, after: int, limit: int
) -> list[tuple[RequestId, State, int, int]]:
    """(request, state, result bytes, finished_no) of a client's samples, in finishing order."""
    query = (
        select(
            RequestRow.id,
            RequestRow.state,
            func.coalesce(func.length(RequestRow.result), 0),
            RequestRow.finished_no,
        )
        .where(RequestRow.sampling_session_id == sampling_session)
        .where(RequestRow.seq >= clone * CLONE_SIZE, RequestRow.seq < (clone + 1) * CLONE_SIZE)
        .where(RequestRow.finished_no > after)
        .order_by(RequestRow.finished_no)
        .limit(limit)
    )
    rows: Sequence[Any] = (await db.execute(query)).all()
    return [(RequestId(id_), State(state), size, number) for id_, state, size, number in rows]


async def last_finished_no(db: AsyncSession) -> int:
    return await db.scalar(select(func.max(RequestRow.finished_no))) or 0


async def _all(db: AsyncSession, query: Select[RequestRow]) -> list[Request]:
    return [value(Request, row) for row in await db.scalars(query)]
