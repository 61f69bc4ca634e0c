"""Fair share by tokens: whoever was served least goes first.

The virtual token counter of Sheng et al., "Fairness in Serving Large Language Models" (OSDI
2024): a tenant that comes back from idling starts at the least counter among those that wait,
so nobody saves up credit, and nobody who keeps working is starved by newcomers.
"""

from __future__ import annotations

from collections import ChainMap
from collections.abc import Hashable, Iterable, Mapping, MutableMapping
from typing import Generic, TypeVar

Key = TypeVar("Key", bound=Hashable)
Group = TypeVar("Group", bound=Hashable)


class VirtualCounters(Generic[Key]):
    """Tokens served to each key, divided by its weight."""

    def __init__(self, weights: Mapping[Key, float] | None = None) -> None:
        self._served: MutableMapping[Key, float] = {}
        self._highest = 0.0
        """Of all that ever were."""
        self._active: frozenset[Key] = frozenset()
        self._weights = weights or {}

    def served(self, key: Key) -> float:
        return self._served.get(key, 0.0)

    def set_active(self, keys: Iterable[Key]) -> None:
        """Say who has work; those who just got some are lifted to the least of those who had.
        When none of those is left, all start equal: at the highest, so that none goes back."""
        now = frozenset(keys)
        if new := now - self._active:
            staying = (self.served(key) for key in now & self._active)
            floor = min(staying, default=self._highest)
            for key in new:
                self._served[key] = max(self.served(key), floor)
        self._active = now

    def charge(self, key: Key, tokens: int) -> None:
        served = self.served(key) + tokens / self._weights.get(key, 1.0)
        self._served[key] = served
        self._highest = max(self._highest, served)

    def forget(self, key: Key) -> None:
        self._served.pop(key, None)

    def trial(self) -> VirtualCounters[Key]:
        """Counters that start as these are and are charged alone; they cost what is charged."""
        twin = VirtualCounters(self._weights)
        twin._served = ChainMap({}, self._served)
        return twin


class GroupedCounters(Generic[Group, Key]):
    """Counters for each group, so that who comes starts level with its own group. Level with all, a
    newcomer would start below the others of a group that is served more for each key."""

    def __init__(self) -> None:
        self._groups: dict[Group, VirtualCounters[Key]] = {}
        self._active: frozenset[Group] = frozenset()
        self._origin: Mapping[Group, VirtualCounters[Key]] = {}
        """Of a trial: the counters that it starts from."""

    def served(self, group: Group, key: Key) -> float:
        counters = self._groups.get(group) or self._origin.get(group)
        return 0.0 if counters is None else counters.served(key)

    def set_active(self, pairs: Iterable[tuple[Group, Key]]) -> None:
        """Say who has work."""
        now: dict[Group, list[Key]] = {}
        for group, key in pairs:
            now.setdefault(group, []).append(key)
        for group in self._active - now.keys():
            if counters := self._groups.get(group):
                counters.set_active(())
        for group, keys in now.items():
            self._own(group).set_active(keys)
        self._active = frozenset(now)

    def charge(self, group: Group, key: Key, tokens: int) -> None:
        self._own(group).charge(key, tokens)

    def forget(self, group: Group, key: Key) -> None:
        if counters := self._groups.get(group):
            counters.forget(key)

    def trial(self) -> GroupedCounters[Group, Key]:
        """Counters that start as these are and are charged alone; they cost what is charged."""
        twin: GroupedCounters[Group, Key] = GroupedCounters()
        twin._origin = self._groups
        return twin

    def _own(self, group: Group) -> VirtualCounters[Key]:
        if group not in self._groups:
            origin = self._origin.get(group)
            self._groups[group] = VirtualCounters() if origin is None else origin.trial()
        return self._groups[group]
