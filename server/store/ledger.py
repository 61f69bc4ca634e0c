"""The journal with its wake-ups: submit, finish, wait.

A long-poll sleeps on an event that the commit of its result sets; nothing polls the database.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

import structlog
from sqlalchemy.exc import InterfaceError, OperationalError
from sqlalchemy.exc import TimeoutError as PoolTimeoutError
from sqlalchemy.ext.asyncio import AsyncSession

from server.core.errors import Gone, NotFound
from server.core.ids import RequestId, SamplingSessionId, TenantId
from server.core.records import Request
from server.core.requests import NEXT, State
from server.core.usage import Sampled
from server.store import journal
from server.store.bell import Bell
from server.store.database import Database, Work

log = structlog.get_logger()

Also = Callable[[AsyncSession], Awaitable[None]]
"""More to write in the commit that stores a request or its result."""
OnFinish = Callable[[AsyncSession, Request, "Outcome"], Awaitable[None]]

_CACHED_RESULT_BYTES = 64 * 2**20
_RETRY_S = 1.0
_PASSING = (OperationalError, InterfaceError, PoolTimeoutError, OSError)
"""What a full disk, or a database that is away or busy, raises."""

Result = TypeVar("Result")


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What came of a request: a result, or an error with whose mistake it was."""

    result: bytes | None = None
    result_type: str | None = None
    error: str | None = None
    error_category: str | None = None
    sampled: Sampled | None = None
    """What a sample cost."""

    @property
    def state(self) -> State:
        return State.DONE if self.error is None else State.FAILED


@dataclass(frozen=True, slots=True)
class Completion:
    """A finished sample, as retrieve_futures tells of it."""

    request: RequestId
    state: State
    result_bytes: int


class Ledger:
    def __init__(self, db: Database, clock: Callable[[], float]) -> None:
        self.db = db
        self._clock = clock
        self._finishing: Bell[RequestId] = Bell()
        self._sampling: Bell[SamplingSessionId] = Bell()
        self._waiting: dict[RequestId, Request] = {}
        self._recent = _RecentResults(_CACHED_RESULT_BYTES)
        self._finished_no = 0
        self._listeners: list[OnFinish] = []

    def listen(self, listener: OnFinish) -> None:
        """Have it write along whenever an outcome is stored, in the same commit."""
        self._listeners.append(listener)

    async def start(self) -> list[Request]:
        """Read where the last process stopped; returns the requests it left unfinished."""
        self._finished_no = await self.db.read(journal.last_finished_no)
        unfinished = await self.db.read(journal.unfinished)
        self._waiting = {request.id: replace(request, payload=None) for request in unfinished}
        return unfinished

    def waiting(self, request: RequestId) -> Request:
        """A request that has no outcome yet, without its payload."""
        return self._waiting[request]

    def mark_started(self, requests: Iterable[RequestId]) -> None:
        """They have been taken up now. Kept in memory until they finish: a crash starts them
        again."""
        now = self._clock()
        for id_ in requests:
            if waiting := self._waiting.get(id_):
                self._waiting[id_] = replace(waiting, started_at=now)

    def wake_all(self) -> None:
        """End every wait, finished or not: the server is going away."""
        self._finishing.ring_all()
        self._sampling.ring_all()

    def now(self) -> float:
        return self._clock()

    async def submit(self, request: Request, also: Also | None = None) -> tuple[Request, bool]:
        """Journal a request; returns the one that stands there, and whether it is the caller's
        to carry out: nobody in this process has been given it before.

        `also` runs before it in the same commit, and only if the request is new."""

        async def work(db: AsyncSession) -> tuple[Request, bool]:
            if also is not None:
                if existing := await journal.find(db, request.id):
                    return existing, False
                await also(db)
            # Nearly always it is new: finding it first would cost as much as storing it.
            if await journal.append(db, request):
                return request, True
            existing = await journal.find(db, request.id)
            assert existing is not None
            return existing, False

        stored, new = await self.db.write(work)
        if stored.state is State.WAITING:
            # It may stand there and be nobody's: a commit that failed only for whoever asked, or
            # a caller that went away before its answer came.
            new = stored.id not in self._waiting
            self._waiting[stored.id] = replace(stored, payload=None)
        return stored, new

    async def finish(self, request: Request, outcome: Outcome, also: Also | None = None) -> None:
        """Commit an outcome, then let those who wait see it. The first outcome stands."""
        await self.finish_all([(request, outcome)], also)

    async def finish_all(
        self, ended: Sequence[tuple[Request, Outcome]], also: Also | None = None
    ) -> None:
        """The same for several requests in one commit: all of it is stored, or nothing."""

        async def work(db: AsyncSession) -> list[Request]:
            if also is not None:
                await also(db)
            return [
                finished
                for request, outcome in ended
                if await self._store(db, finished := self._finished(request, outcome), outcome)
            ]

        for stored in await self._write_surely(work):
            self._recent.put(stored)
        for request, _ in ended:
            self._waiting.pop(request.id, None)
            self._wake(request)

    async def _store(self, db: AsyncSession, finished: Request, outcome: Outcome) -> bool:
        """Whether it was the first outcome: only that one is told of."""
        first = await journal.finish(db, finished)
        if first:
            for listener in self._listeners:
                await listener(db, finished, outcome)
        return first

    def _finished(self, request: Request, outcome: Outcome) -> Request:
        """Called by the writer, so that the numbers grow in the order of the commits: a poll
        that has seen one has seen all before it."""
        assert outcome.state in NEXT[State.WAITING]
        self._finished_no += 1
        return replace(
            request,
            payload=None,
            state=outcome.state,
            started_at=self._waiting.get(request.id, request).started_at,
            finished_at=self._clock(),
            finished_no=self._finished_no,
            result=outcome.result,
            result_type=outcome.result_type,
            error=outcome.error,
            error_category=outcome.error_category,
        )

    async def _write_surely(self, work: Work[Result]) -> Result:
        """An outcome exists once and must not be lost: what passes is waited for."""
        while True:
            try:
                return await self.db.write(work)
            except _PASSING as error:
                log.error("result_not_stored", why=str(error), retry_in_s=_RETRY_S)
                await asyncio.sleep(_RETRY_S)

    async def retrieve(self, request: RequestId, owner: TenantId, hold_s: float) -> Request:
        """The request once it is finished, or as it stands after `hold_s` seconds.

        Raises NotFound for an unknown or foreign id, Gone when its result has been dropped."""
        with self._finishing.listen(request) as rung:
            found = await self._look(request, owner)
            if found.state is State.WAITING and await rung.within(hold_s):
                found = await self._look(request, owner)
        if found.state is State.DONE and found.result is None:
            raise Gone(f"the result of request {request} has expired")
        return found

    async def completions(
        self,
        sampler: SamplingSessionId,
        clone: int,
        after: int,
        hold_s: float,
        limit: int = 256,
    ) -> tuple[list[Completion], int]:
        """Samples of one client that finished after a cursor, and the next cursor."""

        async def read(db: AsyncSession) -> list[tuple[RequestId, State, int, int]]:
            return await journal.completions(db, sampler, clone, after, limit)

        with self._sampling.listen(sampler) as rung:
            rows = await self.db.read(read)
            if not rows and await rung.within(hold_s):
                rows = await self.db.read(read)
        found = [Completion(id_, state, size) for id_, state, size, _ in rows]
        return found, max((number for *_, number in rows), default=after)

    async def _look(self, request: RequestId, owner: TenantId) -> Request:
        found = self._recent.get(request) or self._waiting.get(request)
        if found is None:
            found = await self.db.read(lambda db: journal.find(db, request))
        if found is None or found.owner != owner:
            raise NotFound(f"request {request} does not exist")
        return found

    def _wake(self, request: Request) -> None:
        self._finishing.ring(request.id)
        if request.sampling_session_id is not None:
            self._sampling.ring(request.sampling_session_id)


class _RecentResults:
    """The newest finished requests, up to a number of bytes: most are asked for at once."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._bytes = 0
        self._requests: OrderedDict[RequestId, Request] = OrderedDict()

    def get(self, request: RequestId) -> Request | None:
        return self._requests.get(request)

    def put(self, request: Request) -> None:
        self._requests[request.id] = request
        self._bytes += _size(request)
        while self._bytes > self._max_bytes and self._requests:
            _, dropped = self._requests.popitem(last=False)
            self._bytes -= _size(dropped)


def _size(request: Request) -> int:
    return 512 + len(request.result or b"")
