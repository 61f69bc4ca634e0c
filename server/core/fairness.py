"""Fair share by tokens: whoever was served least goes first.

The virtual token counter of Sheng et al., "Fairness in Serving Large Language Models" (OSDI
2024): a tenant that comes back from idling starts at the least counter among those that wait,
so nobody saves up credit, and nobody who keeps working is starved by newcomers.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping
from typing import Generic, TypeVar

Key = TypeVar("Key", bound=Hashable)


class VirtualCounters(Generic[Key]):
    """Tokens served to each key, divided by its weight."""

    def __init__(self, weights: Mapping[Key, float] | None = None) -> None:
        self._served: dict[Key, float] = {}
        self._active: frozenset[Key] = frozenset()
        self._weights = weights or {}

    def served(self, key: Key) -> float:
        return self._served.get(key, 0.0)

    def set_active(self, keys: Iterable[Key]) -> None:
        """Say who has work; those who just got some are lifted to the least of those who had."""
        now = frozenset(keys)
        staying = now & self._active
        floor = min((self.served(key) for key in staying), default=self._highest())
        for key in now - self._active:
            self._served[key] = max(self.served(key), floor)
        self._active = now

    def charge(self, key: Key, tokens: int) -> None:
        self._served[key] = self.served(key) + tokens / self._weights.get(key, 1.0)

    def forget(self, key: Key) -> None:
        self._served.pop(key, None)

    def copy(self) -> VirtualCounters[Key]:
        twin = VirtualCounters(self._weights)
        twin._served = dict(self._served)
        twin._active = self._active
        return twin

    def _highest(self) -> float:
        """When nobody stays, all start equal; the highest keeps counters from going back."""
        return max(self._served.values(), default=0.0)
