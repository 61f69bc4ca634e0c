"""Who computes next when training and sampling share one thread."""

from __future__ import annotations

from collections.abc import Collection


class TimeShare:
    """Gives each kind of work that is ready the same share of measured time: always the one that
    had least goes next. So while both are ready, sampling waits for at most one microbatch, and
    training for about as long as its own last microbatch took.

    Time not asked for is not saved up: whoever comes back from idling starts level with the others.
    """

    def __init__(self) -> None:
        self._spent: dict[str, float] = {}
        self._ready: frozenset[str] = frozenset()

    def choose(self, ready: Collection[str]) -> str:
        """One of the names that are ready (at least one)."""
        level = min((self._spent[name] for name in self._ready.intersection(ready)), default=0.0)
        for name in ready:
            if name not in self._ready:
                self._spent[name] = max(self._spent.get(name, 0.0), level)
        self._ready = frozenset(ready)
        return min(ready, key=lambda name: self._spent[name])

    def spend(self, name: str, seconds: float) -> None:
        self._spent[name] += seconds
