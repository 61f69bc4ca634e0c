"""Requests that may be what kills a backend."""

from __future__ import annotations

from server.core.ids import RequestId
from server.core.requests import Slice


class Suspects:
    """Of each request: what of it was under way when a backend died last. Deaths at different
    datums are not of the request's making, however long it takes."""

    def __init__(self) -> None:
        self._slices: dict[RequestId, Slice] = {}

    def __contains__(self, request: RequestId) -> bool:
        return request in self._slices

    def blame(self, taken: Slice) -> bool:
        """A backend died of it; whether one had died of these datums before."""
        before = self._slices.get(taken.job.request)
        self._slices[taken.job.request] = taken
        return before is not None and _overlap(before, taken)

    def clear(self, request: RequestId) -> None:
        """It has an outcome."""
        self._slices.pop(request, None)


def _overlap(one: Slice, other: Slice) -> bool:
    """A request without datums is where its first would be."""
    return max(one.first, other.first) < min(_end(one), _end(other))


def _end(taken: Slice) -> int:
    return max(taken.last, taken.first + 1)
