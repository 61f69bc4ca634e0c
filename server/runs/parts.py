"""A large pass in parts, which the backend puts together again."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from backends.contract import ForwardBackward
from server.core.schedule import datums_within


def part(request: ForwardBackward, first: int, last: int) -> ForwardBackward:
    """The datums `first` to `last` (exclusive)."""
    total = len(request.data)
    return replace(request, data=request.data[first:last], more=last < total, part_of=total)


def parts(request: ForwardBackward, token_budget: int) -> Iterator[ForwardBackward]:
    """All of it, a part being under the budget unless one datum is above it."""
    lengths = lengths_of(request)
    first, more = 0, True
    while more:
        last = datums_within(lengths, first, token_budget)
        one = part(request, first, last)
        yield one
        first, more = last, one.more


def lengths_of(request: ForwardBackward) -> tuple[int, ...]:
    """The tokens of each datum."""
    return tuple(len(datum.tokens) for datum in request.data)
