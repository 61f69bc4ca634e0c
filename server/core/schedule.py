"""What runs next: a pure choice from values to values.

The least served run of the least served tenant always comes first, and the kind of its next
request decides the tick: one packed pass, filled up with requests of other runs; the optimizer
steps of every run that waits for one; or a single request of another kind.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile

from server.core.fairness import VirtualCounters
from server.core.ids import RunId, TenantId
from server.core.requests import PASS_KINDS, Job, Kind

FIXED_COST_TOKENS = 32
"""What any request is charged beside its tokens, so that a flood of saves or steps counts too."""


@dataclass(frozen=True, slots=True)
class Tick:
    """Jobs that go to the backend together, in an order that keeps each run's own."""

    jobs: tuple[Job, ...]

    @property
    def kind(self) -> Kind:
        """The kind of the first; passes mix FORWARD and FORWARD_BACKWARD."""
        return self.jobs[0].kind


@dataclass(frozen=True, slots=True)
class Served:
    """What every tenant, and every run within its tenant, has been charged so far."""

    tenants: VirtualCounters[TenantId]
    runs: VirtualCounters[RunId]

    def charge(self, job: Job) -> None:
        cost = job.tokens + FIXED_COST_TOKENS
        self.tenants.charge(job.tenant, cost)
        self.runs.charge(job.run, cost)

    def rank(self, job: Job) -> tuple[float, float, str]:
        """Who goes first: the lowest."""
        return (self.tenants.served(job.tenant), self.runs.served(job.run), job.run)

    def copy(self) -> Served:
        return Served(self.tenants.copy(), self.runs.copy())


def next_tick(
    ready: Mapping[RunId, Sequence[Job]], served: Served, token_budget: int
) -> Tick | None:
    """Choose from each run's ready jobs (in order). None when there are none.

    A pass is filled up to `token_budget`; a first job above the budget goes alone.
    """
    heads = [jobs[0] for jobs in ready.values() if jobs]
    if not heads:
        return None
    first = min(heads, key=served.rank)
    if first.kind in PASS_KINDS:
        return Tick(tuple(_fill_pass(ready, served.copy(), token_budget)))
    if first.kind is Kind.OPTIM_STEP:
        return Tick(tuple(job for job in heads if job.kind is Kind.OPTIM_STEP))
    return Tick((first,))


def _fill_pass(
    ready: Mapping[RunId, Sequence[Job]], served: Served, token_budget: int
) -> list[Job]:
    """Take the next pass of whoever is served least, charge it, repeat until the budget is full.

    A request of another kind is a barrier in its run: nothing behind it is taken.
    """
    queues = {run: deque(takewhile(_is_pass, jobs)) for run, jobs in ready.items()}
    heap = [(served.rank(queue[0]), run) for run, queue in queues.items() if queue]
    heapq.heapify(heap)
    chosen: list[Job] = []
    left = token_budget
    while heap:
        rank, run = heapq.heappop(heap)
        job = queues[run][0]
        if served.rank(job) > rank:  # charged since it was put here: look again in its new place
            heapq.heappush(heap, (served.rank(job), run))
            continue
        if chosen and job.tokens > left:
            break
        chosen.append(queues[run].popleft())
        left -= job.tokens
        served.charge(job)
        if queues[run]:
            heapq.heappush(heap, (served.rank(queues[run][0]), run))
    return chosen


def _is_pass(job: Job) -> bool:
    return job.kind in PASS_KINDS
