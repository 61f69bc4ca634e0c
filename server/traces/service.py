"""Traces of sessions: when each request came, waited and was computed, as a file to download."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import IO, Any
from urllib.parse import urlencode

import orjson
import structlog
from sqlalchemy.exc import SQLAlchemyError

from server.core.errors import NotFound
from server.core.ids import SessionId
from server.core.records import Session
from server.core.signatures import Signer
from server.store.database import AsyncSession, Database
from server.traces import queries
from server.traces.timeline import Timeline

log = structlog.get_logger()

LIFETIME_S = 3600
_WAIT_S = 3.0
"""The SDK asks again after 5 s: most traces are there within this, and so at its first call."""
_WRITTEN_AT_ONCE = 500


@dataclass(frozen=True, slots=True)
class Export:
    """Either is None while the trace is being built."""

    file: str | None = None
    error: str | None = None


class Traces:
    def __init__(
        self, db: Database, folder: Path, secret: bytes, clock: Callable[[], float]
    ) -> None:
        self._db = db
        self._folder = folder
        self._signer = Signer(secret, "trace")
        self._clock = clock
        self._building: dict[SessionId, asyncio.Task[str]] = {}

    async def export(self, session: Session) -> Export:
        """The session's trace. One that is up to date is not built again, and one that was asked
        for before is handed out even if the session has gone on since."""
        task = self._building.get(session.id)
        if task is None:
            name = await self._name(session)
            if (self._folder / name).exists():
                return Export(file=name)
            task = asyncio.create_task(self._build(session, name))
            task = self._building.setdefault(session.id, task)
        await asyncio.wait([task], timeout=_WAIT_S)
        if not task.done():
            return Export()
        self._building.pop(session.id, None)
        if isinstance(error := task.exception(), SQLAlchemyError | OSError):
            log.error("trace_failed", session=session.id, why=str(error))
            return Export(error="the trace could not be written; the server's log has the details")
        return Export(file=task.result())

    async def stop(self) -> None:
        """Leave what is being built; it is asked for again."""
        for task in self._building.values():
            task.cancel()
        await asyncio.gather(*self._building.values(), return_exceptions=True)

    def url(self, name: str, base_url: str) -> str:
        """Where anybody can fetch the file for the next hour."""
        expires = int(self._clock()) + LIFETIME_S
        signature = self._signer.sign(name, expires)
        query = urlencode({"expires": expires, "signature": signature})
        return f"{base_url}/api/v1/traces/{name}?{query}"

    def open(self, name: str, expires: int, signature: str) -> Path:
        """The file behind a URL. Raises NotFound for a wrong or expired one."""
        path = self._folder / name
        good = self._signer.check(signature, name, expires) and expires >= self._clock()
        if not good or not path.is_file():
            raise NotFound("the download link is not valid, or has expired")
        return path

    async def _name(self, session: Session) -> str:
        version = await self._db.read(lambda db: queries.version(db, session.id))
        return f"{session.id}-{version}.json"

    async def _build(self, session: Session, name: str) -> str:
        self._folder.mkdir(parents=True, exist_ok=True)
        await asyncio.to_thread(self._remove_old)
        part = self._folder / f"{name}.part"

        async def write(db: AsyncSession) -> None:
            with part.open("wb") as file:
                await _write(file, _events(db, session, self._clock()), session)

        await self._db.read(write)
        part.replace(self._folder / name)
        return name

    def _remove_old(self) -> None:
        """Files that no link leads to any more; the disk's clock dates them, so it counts."""
        for file in self._folder.iterdir():
            if file.stat().st_mtime < time.time() - 2 * LIFETIME_S:
                file.unlink()


async def _events(db: AsyncSession, session: Session, now: float) -> AsyncIterator[dict[str, Any]]:
    timeline = Timeline(session.id, session.created_at, now)
    yield timeline.begin()
    async for request in queries.in_order(db, session.id, "created_at"):
        for event in timeline.waited(request):
            yield event
    async for request in queries.in_order(db, session.id, "started_at"):
        for event in timeline.computed(request):
            yield event


async def _write(file: IO[bytes], events: AsyncIterator[dict[str, Any]], session: Session) -> None:
    """Viewers know the format by the first bytes, so the events come first."""
    file.write(b'{"traceEvents":[')
    separator = b"\n"
    count = 0
    async for event in events:
        file.write(separator + orjson.dumps(event))
        separator = b",\n"
        count += 1
        if count % _WRITTEN_AT_ONCE == 0:
            await asyncio.sleep(0)  # others have their turn
    started = datetime.fromtimestamp(session.created_at, UTC).isoformat()
    facts = {"session_id": session.id, "session_created_at": started}
    file.write(b'\n],"displayTimeUnit":"ms","otherData":' + orjson.dumps(facts) + b"}\n")
