"""The database: reads run side by side, writes are committed in groups.

One writer serves the whole process. Units of work that arrive while a commit is under way share
the next one, so many submissions cost one disk flush; each still succeeds or fails alone.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from sqlalchemy import event, make_url
from sqlalchemy.engine.interfaces import DBAPIConnection
from sqlalchemy.exc import SQLAlchemyError
from sqlalchemy.ext.asyncio import AsyncEngine, AsyncSession, create_async_engine

Result = TypeVar("Result")
Work = Callable[[AsyncSession], Awaitable[Result]]
"""May be run again after it was rolled back, so it changes nothing but the database."""

_MAX_GROUP = 256
_WRITES = "hearth_writes"


@dataclass(slots=True)
class _Unit:
    work: Work[Any]
    outcome: asyncio.Future[Any]


_Done = tuple[_Unit, Any]
"""With what it returned."""


class Database:
    """Open with `start`, close with `stop`."""

    def __init__(self, url: str) -> None:
        self.engine = _engine(url)
        self._writing = self.engine.execution_options(**{_WRITES: True})
        self._queue: asyncio.Queue[_Unit | None] = asyncio.Queue()
        self._writer: asyncio.Task[None] | None = None

    def start(self) -> None:
        self._writer = asyncio.create_task(self._write_groups(), name="database writer")

    async def stop(self) -> None:
        """Commit what was asked for, then close."""
        if self._writer is not None:
            self._queue.put_nowait(None)
            await self._writer
        await self.engine.dispose()

    async def read(self, work: Work[Result]) -> Result:
        async with AsyncSession(self.engine, expire_on_commit=False) as session:
            return await work(session)

    async def write(self, work: Work[Result]) -> Result:
        """Run one unit of work; returns after it is on disk, raises what it raised."""
        unit = _Unit(work, asyncio.get_running_loop().create_future())
        self._queue.put_nowait(unit)
        # A caller that goes away must not undo what others share the commit with.
        return await asyncio.shield(unit.outcome)

    async def _write_groups(self) -> None:
        while (first := await self._queue.get()) is not None:
            group = [first]
            last = False
            while not self._queue.empty() and len(group) < _MAX_GROUP:
                unit = self._queue.get_nowait()
                if unit is None:
                    last = True
                    break
                group.append(unit)
            await self._commit(group)
            if last:
                return

    async def _commit(self, group: Sequence[_Unit]) -> None:
        """A failed commit fails them all."""
        try:
            done = await self._together(group)
            if done is None:
                done = await self._apart(group)
        except (SQLAlchemyError, OSError) as error:
            for unit in group:
                _fail(unit, error)
            return
        for unit, result in done:
            if not unit.outcome.done():
                unit.outcome.set_result(result)

    async def _together(self, group: Sequence[_Unit]) -> list[_Done] | None:
        """None, and nothing written, when one of several raised: nearly always none does, and
        savepoints take longer than what is between them."""
        async with self._transaction() as session:
            try:
                return [(unit, await unit.work(session)) for unit in group]
            except Exception as error:  # noqa: BLE001 - handed to whoever asked, if it is known who
                await session.rollback()
                if len(group) > 1:
                    return None
                _fail(group[0], error)
                return []

    async def _apart(self, group: Sequence[_Unit]) -> list[_Done]:
        """A unit that raises is rolled back to its savepoint."""
        done: list[_Done] = []
        async with self._transaction() as session:
            for unit in group:
                try:
                    async with session.begin_nested():
                        done.append((unit, await unit.work(session)))
                except Exception as error:  # noqa: BLE001 - handed to whoever asked
                    _fail(unit, error)
        return done

    @asynccontextmanager
    async def _transaction(self) -> AsyncGenerator[AsyncSession]:
        async with AsyncSession(self._writing, expire_on_commit=False) as session, session.begin():
            # Now, so that a lock that cannot be had is no unit's fault.
            await session.connection()
            yield session


def _fail(unit: _Unit, error: Exception) -> None:
    if not unit.outcome.done():
        unit.outcome.set_exception(error)


def sqlite_url(path: Path) -> str:
    return f"sqlite+aiosqlite:///{path}"


def _engine(url: str) -> AsyncEngine:
    if make_url(url).get_backend_name() != "sqlite":
        return create_async_engine(url)
    engine = create_async_engine(url)

    @event.listens_for(engine.sync_engine, "connect")
    def configure(connection: DBAPIConnection, _: Any) -> None:
        # WAL lets readers go on during a commit; FULL makes a commit outlast a power cut.
        # The driver's own transaction handling is off: it would break savepoints.
        connection.isolation_level = None  # pyrefly: ignore[missing-attribute]
        cursor = connection.cursor()
        for pragma in ("journal_mode=WAL", "synchronous=FULL", "busy_timeout=10000"):
            cursor.execute(f"PRAGMA {pragma}")
        cursor.execute("PRAGMA foreign_keys=ON")
        cursor.close()

    @event.listens_for(engine.sync_engine, "begin")
    def begin(connection: Any) -> None:
        # A group that read first and took the lock later would fail, not wait, if another
        # process (`hearth keys`) wrote in between.
        writes = connection.get_execution_options().get(_WRITES, False)
        connection.exec_driver_sql("BEGIN IMMEDIATE" if writes else "BEGIN")

    return engine
