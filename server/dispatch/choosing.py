"""Choosing: what the queues of all runs have for the next tick, and which runs must come first."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import chain, islice

from server.core.ids import RequestId, RunId, TenantId
from server.core.requests import Job, Kind, Slice
from server.core.schedule import Served, Tick, next_tick
from server.dispatch.residency import Residency
from server.runs.registry import LiveRun, Registry


@dataclass(frozen=True, slots=True, kw_only=True)
class DispatchSettings:
    token_budget: int
    gap_wait_s: float
    snapshot_after_s: float
    run_memory_bytes: int
    tenant_weights: Mapping[TenantId, float]


class Chooser:
    """Of one trainer group. `suspects` may have killed a backend: each runs alone, to find out."""

    def __init__(
        self,
        *,
        base_model: str,
        trainer: str,
        registry: Registry,
        residency: Residency,
        served: Served,
        suspects: Container[RequestId],
        settings: DispatchSettings,
        clock: Callable[[], float],
    ) -> None:
        self._base_model = base_model
        self._trainer = trainer
        self._registry = registry
        self._residency = residency
        self._served = served
        self._suspects = suspects
        self._settings = settings
        self._clock = clock
        self._last: Kind | None = None

    def choose(self) -> Tick | None:
        """Take what runs next off its queues, and have the runs brought that work waits for. None
        when nothing is ready."""
        ready, away = self._waiting()
        self._residency.tidy()
        self._residency.bring(away)
        tick = next_tick(ready, self._served, self._settings.token_budget, self._last)
        if tick is None:
            return None
        if any(job.request in self._suspects for job in tick.jobs):
            tick = Tick(tick.slices[:1])
        self._last = tick.kind
        for taken in tick.slices:
            self._registry.known(taken.job.run).queue.take(taken)
            self._served.charge(taken)
        return tick

    def gap_ends_in(self) -> float | None:
        """Seconds until the next missing number will be given up on, if one is waited for."""
        ends = [
            end
            for live in self._runs()
            if (end := live.queue.gap_ends_at(self._settings.gap_wait_s)) is not None
        ]
        return min(ends) - self._clock() if ends else None

    def _waiting(self) -> tuple[dict[RunId, Iterable[Slice]], list[Job]]:
        """What the runs that can run now may do next, and the first job of each of the others."""
        now = self._clock()
        ready: dict[RunId, Iterable[Slice]] = {}
        heads: list[Job] = []
        away: list[Job] = []
        for live in self._runs():
            slices = self._slices(live, now)
            head = next(slices, None)
            if head is None:
                continue
            if self._can_run(live, head.job):
                ready[live.run.id] = chain([head], slices)
                heads.append(head.job)
            else:
                away.append(head.job)
        self._served.set_active(heads)
        return ready, away

    def _runs(self) -> Iterator[LiveRun]:
        return self._registry.busy(self._base_model, self._trainer)

    def _slices(self, live: LiveRun, now: float) -> Iterator[Slice]:
        """What the run may do next: of one that leaves, the rest of the request it is in."""
        slices = live.queue.ready(now, self._settings.gap_wait_s)
        if not live.leaving:
            return slices
        return islice(slices, int(live.queue.begun and self._residency.ready(live)))

    def _can_run(self, live: LiveRun, head: Job) -> bool:
        """Whether its tensors are there, or it needs none."""
        return head.creates or live.creation_error is not None or self._residency.ready(live)
