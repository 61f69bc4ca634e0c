"""What calls cost, stored behind them: nobody waits for a bill, and a reader who leaves in the
middle of a stream does not escape it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import structlog
from sqlalchemy.exc import SQLAlchemyError

from server.core.ids import TenantId
from server.core.usage import Sampled
from server.store.database import Database
from server.usage.direct import add_sampled
from server.usage.service import HOUR_S

log = structlog.get_logger()

_RETRY_S = 1.0
_LAST_S = 5.0


class Bills:
    def __init__(self, db: Database, clock: Callable[[], float]) -> None:
        self._db = db
        self._clock = clock
        self._tasks: set[asyncio.Task[None]] = set()

    def charge(self, request: str, owner: TenantId, base_model: str, cost: Sampled) -> None:
        hour = int(self._clock() // HOUR_S)
        task = asyncio.create_task(self._store(request, owner, base_model, hour, cost))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def settle(self) -> None:
        """Returns when all are stored, or a while later."""
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=_LAST_S)

    async def stop(self) -> None:
        await self.settle()
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _store(
        self, request: str, owner: TenantId, base_model: str, hour: int, cost: Sampled
    ) -> None:
        """A database that is away is waited for."""
        while True:
            try:
                return await self._db.write(
                    lambda db: add_sampled(db, request, owner, base_model, hour, cost)
                )
            except (SQLAlchemyError, OSError) as error:
                log.error("usage_not_stored", request=request, why=str(error))
                await asyncio.sleep(_RETRY_S)
