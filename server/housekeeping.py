"""What time does to things: checkpoints expire, sessions fall silent, results grow old."""

from __future__ import annotations

import asyncio

import structlog
from sqlalchemy.exc import SQLAlchemyError

from server.api.rooms import Rooms
from server.samplers import recorded
from server.store import journal

log = structlog.get_logger()

PERIOD_S = 30.0
ABANDONED_AFTER_S = 86_400.0
"""How long the unnamed samplers of a client that fell silent are kept for its return."""


class Housekeeping:
    def __init__(self, rooms: Rooms) -> None:
        self._rooms = rooms
        self._results_expired_to = 0.0
        self._started_at = rooms.ledger.now()

    async def run(self) -> None:
        """Until cancelled. A database or disk that is away now is tried again next time."""
        while True:
            try:
                await self.sweep()
            except (SQLAlchemyError, OSError) as error:
                log.warning("housekeeping_failed", why=str(error))
            await asyncio.sleep(PERIOD_S)

    def _abandoned_before(self) -> float:
        """Silence counts only while the server could hear: after it was away for days, every
        client gets the whole time to come back."""
        before = self._rooms.ledger.now() - ABANDONED_AFTER_S
        return before if before >= self._started_at else 0.0

    async def sweep(self) -> None:
        rooms = self._rooms
        if expired := await rooms.checkpoints.remove_expired():
            log.info("checkpoints_expired", count=expired)
        for session in await rooms.sessions.expire_silent(rooms.settings.session_timeout_s):
            log.info("session_expired", session=session)
            rooms.release(session)
        await rooms.samplers.drop_abandoned(self._abandoned_before())
        await rooms.checkpoints.remove_retired(rooms.samplers.adapters_in_use())
        now = rooms.ledger.now()
        await rooms.ledger.db.write(lambda db: recorded.remove_expired(db, now))
        since, before = self._results_expired_to, now - rooms.settings.result_ttl_s
        await rooms.ledger.db.write(lambda db: journal.expire_results(db, since, before))
        self._results_expired_to = before
