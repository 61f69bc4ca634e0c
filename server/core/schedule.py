"""What runs next: a pure choice from values to values.

The optimizer steps of every run that waits for one go first, together, but not twice in a row: a
run stands still at its step, and its batch has been charged already. Else the least served run of
the least served tenant decides: one packed pass of datums of many runs, or a single request of
another kind.

A pass is shared out by turns. Each turn goes to whoever is served least and takes datums of its
oldest request, a quantum at most but one datum at least. So between turns, two tenants that both
have passes waiting differ in what they were served, divided by their weights, by no more than one
turn: the larger of a quantum and a datum, and what a request is charged beside its tokens.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from server.core.fairness import GroupedCounters, VirtualCounters
from server.core.ids import RequestId, RunId, TenantId
from server.core.requests import PASS_KINDS, Job, Kind, Slice

TURNS_PER_TICK = 16
"""How many turns a tick has room for: with more the tenants share it more finely, with fewer the
datums of a run stay together where others want the device too."""


@dataclass(frozen=True, slots=True)
class Tick:
    """Slices that go to the backend together, in an order that keeps each run's own."""

    slices: tuple[Slice, ...]

    @property
    def jobs(self) -> tuple[Job, ...]:
        return tuple(one.job for one in self.slices)

    @property
    def kind(self) -> Kind:
        """The kind of the first; passes mix FORWARD and FORWARD_BACKWARD."""
        return self.slices[0].job.kind

    @property
    def tokens(self) -> int:
        return sum(one.tokens for one in self.slices)


@dataclass(frozen=True, slots=True)
class Served:
    """What every tenant, and every run within its tenant, has been charged so far."""

    tenants: VirtualCounters[TenantId]
    runs: GroupedCounters[TenantId, RunId]

    def set_active(self, jobs: Sequence[Job]) -> None:
        """Say what waits: one job of each run that has any."""
        self.tenants.set_active({job.tenant for job in jobs})
        self.runs.set_active((job.tenant, job.run) for job in jobs)

    def charge(self, taken: Slice) -> None:
        self.tenants.charge(taken.job.tenant, taken.cost)
        self.runs.charge(taken.job.tenant, taken.job.run, taken.cost)

    def trial(self) -> Served:
        return Served(self.tenants.trial(), self.runs.trial())


def next_tick(
    ready: Mapping[RunId, Iterable[Slice]],
    served: Served,
    token_budget: int,
    last: Kind | None = None,
) -> Tick | None:
    """Choose from what each run may do next (in order; no more of it is read than is needed).
    None when there is nothing. `last` is the kind of the tick before.

    A pass keeps to `token_budget`; a datum above the budget goes alone.
    """
    lines = [line for slices in ready.values() if (line := _Line.of(slices)) is not None]
    steps = tuple(line.head for line in lines if line.head.job.kind is Kind.OPTIM_STEP)
    others = [line for line in lines if line.head.job.kind is not Kind.OPTIM_STEP]
    if steps and not (others and last is Kind.OPTIM_STEP):
        return Tick(steps)
    first = _Turns(others, served).next()
    if first is None:
        return None
    if not _is_pass(first.head):
        return Tick((first.head,))
    return Tick(_fill_pass([line for line in others if _is_pass(line.head)], served, token_budget))


def datums_within(lengths: Sequence[int], first: int, room: int) -> int:
    """The end of the datums from `first` on that have `room` tokens together at most: of one
    datum at least, where there is one."""
    last = first
    while last < len(lengths) and (last == first or lengths[last] <= room):
        room -= lengths[last]
        last += 1
    return last


@dataclass(slots=True)
class _Line:
    """What one run waits for, its next slice taken out."""

    head: Slice
    rest: Iterator[Slice]

    @classmethod
    def of(cls, slices: Iterable[Slice]) -> _Line | None:
        rest = iter(slices)
        head = next(rest, None)
        return None if head is None else cls(head, rest)

    def advance(self, taken: Slice) -> bool:
        """Go on behind what was taken. False when no pass follows: a request of another kind is
        a barrier."""
        left = Slice(taken.job, taken.last, self.head.last) if taken.more else None
        following = left or next(self.rest, None)
        if following is None or not _is_pass(following):
            return False
        self.head = following
        return True


def _fill_pass(lines: Sequence[_Line], served: Served, token_budget: int) -> tuple[Slice, ...]:
    """Give turns until a datum does not fit any more. The next tick begins with it: were others
    let past, its run could wait for ever."""
    turns = _Turns(lines, served)
    chosen: dict[RequestId, Slice] = {}
    left, quantum = token_budget, max(1, token_budget // TURNS_PER_TICK)
    while (line := turns.next()) is not None:
        job, first = line.head.job, line.head.first
        needed = job.lengths[first] if job.lengths else 0
        if chosen and needed > left:
            break
        taken = Slice(job, first, datums_within(job.lengths, first, min(quantum, left)))
        left -= taken.tokens
        begun = chosen.get(job.request, taken)
        chosen[job.request] = Slice(job, begun.first, taken.last)
        turns.end(line, taken)
    return tuple(chosen.values())


class _Turns:
    """Whose turn it is: the least served run of the least served tenant. Two heaps deep, the
    second made on a tenant's first turn, so that those who get none cost next to nothing."""

    def __init__(self, lines: Sequence[_Line], served: Served) -> None:
        self._served = served.trial()
        self._lines: dict[TenantId, list[_Line]] = {}
        for line in lines:
            self._lines.setdefault(line.head.job.tenant, []).append(line)
        self._heaps: dict[TenantId, list[tuple[float, RunId, _Line]]] = {}
        self._tenants = [(served.tenants.served(tenant), tenant) for tenant in self._lines]
        heapq.heapify(self._tenants)

    def next(self) -> _Line | None:
        """The line whose turn it is; nobody else's comes before it ends."""
        if not self._tenants:
            return None
        _, tenant = heapq.heappop(self._tenants)
        if tenant not in self._heaps:
            self._heaps[tenant] = [self._entry(line) for line in self._lines[tenant]]
            heapq.heapify(self._heaps[tenant])
        return heapq.heappop(self._heaps[tenant])[2]

    def end(self, line: _Line, taken: Slice) -> None:
        """Charge what the line took, and let it and its tenant wait for their next turns."""
        self._served.charge(taken)
        tenant = taken.job.tenant
        heap = self._heaps[tenant]
        if line.advance(taken):
            heapq.heappush(heap, self._entry(line))
        if heap:
            heapq.heappush(self._tenants, (self._served.tenants.served(tenant), tenant))

    def _entry(self, line: _Line) -> tuple[float, RunId, _Line]:
        job = line.head.job
        return self._served.runs.served(job.tenant, job.run), job.run, line


def _is_pass(one: Slice) -> bool:
    return one.job.kind in PASS_KINDS
