"""One policy before a fleet of simulated replicas."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from statistics import quantiles

from backends.sampling.vllm.routing import Choose, ReplicaView, RoutedRequest
from tests.benchmarks.routing.clock import Clock, Until
from tests.benchmarks.routing.engine import Ask, Costs, Engine
from tests.benchmarks.routing.workloads import Workload


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    tokens_per_s: float
    """Generated."""
    p50_s: float
    """Of the time from a request to its last sample."""
    p99_s: float
    prefix_hits: float
    """Share of the prompt tokens that were cached."""
    adapter_loads: int
    imbalance: float
    """Load of the fullest replica over that of the mean one; both averaged over time."""


class Fleet:
    """Counts loads and remembers a session's replica as the real one does."""

    def __init__(
        self, clock: Clock, costs: Costs, replicas: int, policy: Choose, key: Callable[[Ask], str]
    ) -> None:
        names = [f"replica-{i}" for i in range(replicas)]
        self.engines = {name: Engine(name, clock, costs) for name in names}
        self.latencies_s: list[float] = []
        self.tokens = 0
        self.fullest = self.mean = 0.0
        """Their loads, times the seconds that they lasted."""
        self._clock = clock
        self._policy = policy
        self._key = key
        self._stuck_to: dict[str, str] = {}
        self._counted_until_s = 0.0

    def send(self, ask: Ask) -> Until:
        def begin(go_on: Callable[[], None]) -> None:
            began_s = self._clock.now_s

            def ended() -> None:
                self.count()
                self.latencies_s.append(self._clock.now_s - began_s)
                self.tokens += sum(ask.output_tokens)
                go_on()

            self.count()
            self._choose(ask).submit(ask, ended)

        return Until(begin)

    def count(self) -> None:
        passed_s = self._clock.now_s - self._counted_until_s
        loads = [engine.load for engine in self.engines.values()]
        self.fullest += max(loads) * passed_s
        self.mean += sum(loads) / len(loads) * passed_s
        self._counted_until_s = self._clock.now_s

    def _choose(self, ask: Ask) -> Engine:
        session = self._key(ask)
        views = [
            ReplicaView(name=engine.name, load=engine.load, adapters=frozenset(engine.adapters))
            for engine in self.engines.values()
        ]
        request = RoutedRequest(
            adapter=ask.adapter, session=session, stuck_to=self._stuck_to.get(session)
        )
        self._stuck_to[session] = self._policy(views, request)
        return self.engines[self._stuck_to[session]]


def simulate(
    workload: Workload,
    policy: Choose,
    key: Callable[[Ask], str],
    *,
    costs: Costs,
    replicas: int,
    seed: int,
    seconds: float,
    crowd: float,
) -> Report:
    clock = Clock()
    fleet = Fleet(clock, costs, replicas, policy, key)
    for client in workload(fleet.send, seed, crowd):
        clock.start(client)
    clock.run(until_s=seconds)
    engines = fleet.engines.values()
    percentiles = quantiles(fleet.latencies_s, n=100)
    return Report(
        tokens_per_s=fleet.tokens / seconds,
        p50_s=percentiles[49],
        p99_s=percentiles[98],
        prefix_hits=sum(e.cached_tokens for e in engines) / sum(e.prompt_tokens for e in engines),
        adapter_loads=sum(engine.adapter_loads for engine in engines),
        imbalance=fleet.fullest / fleet.mean,
    )
