"""A connection that does not wait for ever, as uvicorn's own does, for a client to say more."""

from __future__ import annotations

import asyncio
from typing import ClassVar

from uvicorn.protocols.http.h11_impl import H11Protocol


class Connection(H11Protocol):
    """Closed when a request's headers, or what is left of a body that nobody reads any more, take
    longer than `patience_s`. A body that is read has its limit in `api/rooms.py`, and between two
    requests uvicorn's keep-alive holds."""

    patience_s: ClassVar[float] = 60.0
    _due: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:
        super().connection_made(transport)
        self._expect_more()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if self.cycle is not None and not self.cycle.response_complete:
            self._relax()
        elif self._due is None and not self.transport.is_closing():
            self._expect_more()

    def connection_lost(self, exc: Exception | None) -> None:
        self._relax()
        super().connection_lost(exc)

    def _expect_more(self) -> None:
        self._due = self.loop.call_later(self.patience_s, self.transport.close)

    def _relax(self) -> None:
        if self._due is not None:
            self._due.cancel()
            self._due = None
