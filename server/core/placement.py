"""Which trainer group a run goes to: pure choices from values to values.

A run's share of a group is one part of it, by fair share, whatever the others send. So what slows
it down is how many others work there and not how much each of them has waiting: that is the load.
Those that worked lately count before those that have work at this moment, since a run that samples
between its steps comes back, and twenty new ones that have sent nothing yet must not all go to one
place.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from server.core.ids import RunId

LATELY_S = 300.0
"""A run that was silent for longer does not count as working."""


@dataclass(frozen=True, slots=True, order=True)
class Load:
    """Numbers of runs, compared one after the other."""

    working: int = 0
    """Those that have work, or had some lately."""
    busy: int = 0
    """Those that have work now."""
    runs: int = 0
    """All that belong to the group."""

    def __add__(self, other: Load) -> Load:
        return Load(self.working + other.working, self.busy + other.busy, self.runs + other.runs)


ONE_BUSY = Load(working=1, busy=1, runs=1)


def load_of(runs: Iterable[tuple[bool, float]]) -> Load:
    """Of each run whether it has work, and how many seconds ago it last asked for something."""
    working = busy = number = 0
    for is_busy, silent_s in runs:
        working += is_busy or silent_s < LATELY_S
        busy += is_busy
        number += 1
    return Load(working, busy, number)


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """A trainer group as the placement sees it."""

    name: str
    load: Load
    alive: bool = True
    open: bool = True
    """Whether it takes runs."""


def placed(runs: Sequence[RunId], groups: Sequence[Group]) -> dict[RunId, str]:
    """Runs that have work, one after the other, each to the group that is least loaded by then.
    A group that is being started again gets one only if no other takes any; nobody gets any when
    none does."""
    candidates = [group for group in groups if group.open]
    alive = [group for group in candidates if group.alive]
    heap = [(group.load, number, group.name) for number, group in enumerate(alive or candidates)]
    heapq.heapify(heap)
    chosen: dict[RunId, str] = {}
    for run in runs if heap else ():
        load, number, name = heap[0]
        heapq.heapreplace(heap, (load + ONE_BUSY, number, name))
        chosen[run] = name
    return chosen


def relief(groups: Sequence[Group]) -> tuple[str, str] | None:
    """From which group to which a run should move, or None. Only runs that have work count, and
    two more of them are needed: with one the groups would change places."""
    working = [group for group in groups if group.open and group.alive]
    most = max(working, key=lambda group: group.load.busy, default=None)
    least = min(working, key=lambda group: group.load.busy, default=None)
    if most is None or least is None or most.load.busy - least.load.busy < 2:
        return None
    return most.name, least.name
