"""Who goes next: the scheduler of this server, and two others to compare it with."""

from __future__ import annotations

import heapq
import itertools
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from itertools import chain
from typing import Protocol

from server.core.fairness import GroupedCounters, VirtualCounters
from server.core.ids import RunId, TenantId
from server.core.requests import PASS_KINDS, Job, Kind, Slice
from server.core.schedule import Served, Tick, next_tick
from server.core.sequence import RunQueue


class Policy(Protocol):
    def add(self, job: Job, now: float) -> None: ...

    def take(self, now: float) -> Tick | None:
        """What runs next, off the queues. None only when nothing is ready."""
        ...


class FairShare:
    """The scheduler of this server, held as its dispatcher holds it."""

    GAP_WAIT_S = 5.0
    """As in the settings; these clients leave no gaps."""

    def __init__(self, token_budget: int, weights: Mapping[TenantId, float]) -> None:
        self._token_budget = token_budget
        self._served = Served(VirtualCounters(weights), GroupedCounters())
        self._queues: dict[RunId, RunQueue] = {}
        self._busy: dict[RunId, RunQueue] = {}
        """Those in which anything waits."""
        self._last: Kind | None = None

    def add(self, job: Job, now: float) -> None:
        queue = self._busy[job.run] = self._queues.setdefault(job.run, RunQueue())
        queue.add(job, now)

    def take(self, now: float) -> Tick | None:
        tick = next_tick(self._ready(now), self._served, self._token_budget, self._last)
        if tick is None:
            return None
        self._last = tick.kind
        for taken in tick.slices:
            queue = self._busy[taken.job.run]
            queue.take(taken)
            if not queue:
                del self._busy[taken.job.run]
            self._served.charge(taken)
        return tick

    def _ready(self, now: float) -> dict[RunId, Iterable[Slice]]:
        ready: dict[RunId, Iterable[Slice]] = {}
        heads: list[Job] = []
        for run, queue in self._busy.items():
            slices = queue.ready(now, self.GAP_WAIT_S)
            head = next(slices, None)
            if head is not None:
                ready[run] = chain([head], slices)
                heads.append(head.job)
        self._served.set_active(heads)
        return ready


class FirstComeFirstServed:
    """Whole requests of all tenants in the order they came, packed into passes like ours."""

    def __init__(self, token_budget: int, weights: Mapping[TenantId, float]) -> None:
        self._token_budget = token_budget
        self._numbers = itertools.count()
        self._queues: dict[RunId, deque[tuple[int, Job]]] = {}
        """Numbered as they came."""
        self._passes: list[tuple[int, RunId]] = []
        """A heap of the runs whose oldest request is a pass, by its number."""
        self._steps: dict[RunId, int] = {}
        """The runs whose oldest request is an optimizer step, and its number."""

    def add(self, job: Job, now: float) -> None:
        queue = self._queues.setdefault(job.run, deque())
        queue.append((next(self._numbers), job))
        if len(queue) == 1:
            self._enter(job.run)

    def take(self, now: float) -> Tick | None:
        step_first = self._steps and (
            not self._passes or min(self._steps.values()) < self._passes[0][0]
        )
        chosen = self._take_steps() if step_first else self._take_passes()
        return Tick(tuple(job.whole for job in chosen)) if chosen else None

    def _take_steps(self) -> list[Job]:
        runs, self._steps = self._steps, {}
        return [self._pop(run) for run in runs]

    def _take_passes(self) -> list[Job]:
        """The oldest, until one does not fit."""
        chosen: list[Job] = []
        left = self._token_budget
        while self._passes:
            run = self._passes[0][1]
            tokens = self._queues[run][0][1].tokens
            if chosen and tokens > left:
                break
            heapq.heappop(self._passes)
            chosen.append(self._pop(run))
            left -= tokens
        return chosen

    def _pop(self, run: RunId) -> Job:
        _, job = self._queues[run].popleft()
        if self._queues[run]:
            self._enter(run)
        return job

    def _enter(self, run: RunId) -> None:
        number, job = self._queues[run][0]
        if job.kind in PASS_KINDS:
            heapq.heappush(self._passes, (number, run))
        else:
            self._steps[run] = number


class OneTenantAtATime:
    """Tenants in turn, one whole request each, so that every pass has one adapter: what a server
    does that switches adapters."""

    def __init__(self, token_budget: int, weights: Mapping[TenantId, float]) -> None:
        self._turns: deque[TenantId] = deque()
        self._queues: dict[TenantId, deque[Job]] = {}

    def add(self, job: Job, now: float) -> None:
        queue = self._queues.setdefault(job.tenant, deque())
        if not queue:
            self._turns.append(job.tenant)
        queue.append(job)

    def take(self, now: float) -> Tick | None:
        if not self._turns:
            return None
        tenant = self._turns.popleft()
        job = self._queues[tenant].popleft()
        if self._queues[tenant]:
            self._turns.append(tenant)
        return Tick((job.whole,))


POLICIES: Mapping[str, Callable[[int, Mapping[TenantId, float]], Policy]] = {
    "Hearth": FairShare,
    "first come": FirstComeFirstServed,
    "in turn": OneTenantAtATime,
}
