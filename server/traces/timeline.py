"""Requests as a timeline in Chrome's trace event format, which Perfetto and chrome://tracing open.

Each run and each sampling session has two groups of rows: what waited, and what was computed. Of
requests that overlap each gets a row of its own, since slices of one row must nest.
"""

from __future__ import annotations

import heapq
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from server.core.ids import SessionId
from server.traces.queries import Traced

_PID = 1
_US = 1e6


@dataclass(slots=True)
class _Lanes:
    """The rows of one group."""

    count: int = 0
    free: list[int] = field(default_factory=list)
    taken: list[tuple[float, int]] = field(default_factory=list)
    """(until when, which), the earliest first."""

    def take(self, start: float, end: float) -> int:
        """The lowest row that is free from `start` on. Called in the order of `start`."""
        while self.taken and self.taken[0][0] <= start:
            heapq.heappush(self.free, heapq.heappop(self.taken)[1])
        if not self.free:
            self.count += 1
            self.free = [self.count]
        lane = heapq.heappop(self.free)
        heapq.heappush(self.taken, (end, lane))
        return lane


class Timeline:
    """Give each of `waited` and `computed` the requests in the order of its start; every call
    yields events to write. Times count from `origin`; what is not over lasts until `now`."""

    def __init__(self, session: SessionId, origin: float, now: float) -> None:
        self._session = session
        self._origin = origin
        self._now = now
        self._lanes: defaultdict[str, _Lanes] = defaultdict(_Lanes)
        self._threads: dict[tuple[str, int], int] = {}

    def begin(self) -> dict[str, Any]:
        return self._metadata("process_name", 0, name=self._session)

    def waited(self, request: Traced) -> Iterator[dict[str, Any]]:
        """From its arrival until it was taken up."""
        end = request.started_at or request.finished_at or self._now
        yield from self._slice(request, "queued", request.created_at, end)

    def computed(self, request: Traced) -> Iterator[dict[str, Any]]:
        """From when it was taken up until its result was stored."""
        assert request.started_at is not None
        end = request.finished_at or self._now
        yield from self._slice(request, "compute", request.started_at, end)

    def _slice(
        self, request: Traced, phase: str, start: float, end: float
    ) -> Iterator[dict[str, Any]]:
        end = max(start, end)
        group = f"{request.source.removeprefix(f'{self._session}:')} {phase}"
        lane = self._lanes[group].take(start, end)
        if (group, lane) not in self._threads:
            self._threads[group, lane] = len(self._threads) + 1
            title = group if lane == 1 else f"{group} ({lane})"
            yield self._metadata("thread_name", self._threads[group, lane], name=title)
        yield {
            "ph": "X",
            "name": str(request.kind),
            "cat": phase,
            "pid": _PID,
            "tid": self._threads[group, lane],
            "ts": round((start - self._origin) * _US),
            "dur": round((end - start) * _US),
            "args": _facts(request),
        }

    def _metadata(self, what: str, thread: int, **args: Any) -> dict[str, Any]:
        return {"ph": "M", "name": what, "pid": _PID, "tid": thread, "args": args}


def _facts(request: Traced) -> dict[str, Any]:
    facts: dict[str, Any] = {
        "request_id": request.id,
        "seq_id": request.seq,
        "tokens": request.tokens,
        "state": str(request.state),
    }
    if request.error_category is not None:
        facts["error_category"] = request.error_category
    return facts
