"""Who is let in next, where only so much may be in at once. Pure: no clock, no IO.

Whoever has the least goes first: what a tenant was served so far, and what those of its entries
that are in may still cost, divided by its weight. An entry is charged with what it did cost when
it leaves. So between two tenants that both have entries waiting, what they were served differs by
no more than what the other has in, and one entry.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from server.core.fairness import VirtualCounters
from server.core.ids import TenantId


@dataclass(frozen=True, eq=False, slots=True, kw_only=True)
class Entry:
    """Of one request. It is itself alone: two that say the same are two."""

    tenant: TenantId
    size: int
    """How much of the room it takes."""
    tokens: int
    """What it may cost at most."""


class FairQueue:
    """Entries of a tenant go in in the order they came. As long as there is any room the next one
    is let in, however large it is, so large ones wait no longer than others."""

    def __init__(self, room: int, weights: Mapping[TenantId, float] | None = None) -> None:
        self._room = room
        self._waiting: dict[TenantId, dict[Entry, None]] = {}
        self._inside: set[Entry] = set()
        self._size_inside = 0
        self._served: VirtualCounters[TenantId] = VirtualCounters(weights)
        self._promised: VirtualCounters[TenantId] = VirtualCounters(weights)
        """The most that what is inside may cost."""

    @property
    def num_waiting(self) -> int:
        return sum(map(len, self._waiting.values()))

    @property
    def size_inside(self) -> int:
        return self._size_inside

    def join(self, entry: Entry) -> None:
        self._waiting.setdefault(entry.tenant, {})[entry] = None
        self._served.set_active(self._waiting)

    def admit(self, stuck: int = 0) -> list[Entry]:
        """Those that go in now, in their order. `stuck` of what is inside does not count: it
        needs no room until it moves again."""
        admitted = []
        while self._waiting and self._size_inside < self._room + stuck:
            tenant = min(self._waiting, key=self._level)
            entry = next(iter(self._waiting[tenant]))
            self._forget(entry)
            self._inside.add(entry)
            self._size_inside += entry.size
            self._promised.charge(tenant, entry.tokens)
            admitted.append(entry)
        return admitted

    def leave(self, entry: Entry, tokens: int) -> None:
        """It is over, having cost so many tokens, or waits no longer, which costs nothing."""
        if entry not in self._inside:
            self._forget(entry)
            return
        self._inside.remove(entry)
        self._size_inside -= entry.size
        self._promised.charge(entry.tenant, -entry.tokens)
        self._served.charge(entry.tenant, tokens)

    def _level(self, tenant: TenantId) -> float:
        return self._served.served(tenant) + self._promised.served(tenant)

    def _forget(self, entry: Entry) -> None:
        waiting = self._waiting[entry.tenant]
        del waiting[entry]
        if not waiting:
            del self._waiting[entry.tenant]
        self._served.set_active(self._waiting)
