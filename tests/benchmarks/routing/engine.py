"""A replica with continuous batching, in virtual time.

Every step gives each running sequence one token and takes `step_s + sequence_s * running`. New
sequences wait in order for a free place. Prefill and the loading of an adapter hold all of them up.
"""

from __future__ import annotations

import heapq
from collections import Counter, OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from itertools import count

from tests.benchmarks.routing.clock import Clock


@dataclass(frozen=True, slots=True, kw_only=True)
class Costs:
    step_s: float
    sequence_s: float
    prefill_token_s: float
    adapter_load_s: float
    max_running: int
    adapter_slots: int
    cache_tokens: int
    """Of prefixes; those least recently used leave."""


COSTS = {
    "gpu": Costs(
        step_s=0.010,
        sequence_s=0.0001,
        prefill_token_s=0.00005,
        adapter_load_s=0.2,
        max_running=128,
        adapter_slots=16,
        cache_tokens=300_000,
    ),
    "cpu": Costs(
        step_s=0.030,
        sequence_s=0.004,
        prefill_token_s=0.001,
        adapter_load_s=0.2,
        max_running=32,
        adapter_slots=4,
        cache_tokens=60_000,
    ),
}
"""Assumed, not measured: of the order of an 8B model on a large GPU, where a step costs nearly the
same however many run, and of a small model on a few cores, where every sequence costs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ask:
    """A request, with the lengths that its samples will turn out to have."""

    adapter: str
    session: str
    """The sampler that it names."""
    conversation: str
    """Prefixes are shared with earlier requests of the same conversation."""
    prompt_tokens: int
    output_tokens: tuple[int, ...]
    """Of each sample."""


@dataclass(eq=False)
class _Waiting:
    ask: Ask
    ended: Callable[[], None]
    unfinished: int
    to_start: list[int]
    prefilled: bool = False


class Engine:
    def __init__(self, name: str, clock: Clock, costs: Costs) -> None:
        self.name = name
        self.load = 0
        """Samples sent to it and not finished."""
        self.adapters: OrderedDict[str, None] = OrderedDict()
        """Held ones, that used last at the end."""
        self.adapter_loads = 0
        self.prompt_tokens = self.cached_tokens = 0
        self._clock = clock
        self._costs = costs
        self._queue: list[_Waiting] = []
        self._running: list[tuple[float, int, _Waiting]] = []
        """By the step at which it ends."""
        self._using: Counter[str] = Counter()
        """Running sequences by adapter."""
        self._prefixes: OrderedDict[str, int] = OrderedDict()
        """Cached tokens by conversation."""
        self._order = count()
        self._steps = 0.0
        self._steps_known_at_s = 0.0
        """When `_steps` was true; later than now while the engine is held up."""
        self._plan = 0

    def submit(self, ask: Ask, ended: Callable[[], None]) -> None:
        self._catch_up()
        self.load += len(ask.output_tokens)
        outputs = list(ask.output_tokens)
        self._queue.append(_Waiting(ask, ended, len(outputs), outputs))
        self._admit()
        self._plan_next()

    def _step_s(self) -> float:
        return self._costs.step_s + self._costs.sequence_s * len(self._running)

    def _catch_up(self) -> None:
        passed_s = self._clock.now_s - self._steps_known_at_s
        if passed_s > 0:
            self._steps += passed_s / self._step_s()
            self._steps_known_at_s = self._clock.now_s

    def _admit(self) -> None:
        """In order; what needs an adapter slot while every adapter runs lets others pass."""
        for waiting in list(self._queue):
            if len(self._running) == self._costs.max_running:
                return
            if self._hold_adapter(waiting.ask.adapter):
                self._begin(waiting)
                if not waiting.to_start:
                    self._queue.remove(waiting)

    def _hold_adapter(self, adapter: str) -> bool:
        if adapter not in self.adapters:
            if len(self.adapters) == self._costs.adapter_slots:
                idle = next((a for a in self.adapters if not self._using[a]), None)
                if idle is None:
                    return False
                del self.adapters[idle]
            self.adapter_loads += 1
            self._steps_known_at_s += self._costs.adapter_load_s
            self.adapters[adapter] = None
        self.adapters.move_to_end(adapter)
        return True

    def _begin(self, waiting: _Waiting) -> None:
        """As many of its samples as there are places for; the first pays for the prompt."""
        if not waiting.prefilled:
            waiting.prefilled = True
            self._prefill(waiting.ask)
        places = self._costs.max_running - len(self._running)
        begun, waiting.to_start = waiting.to_start[:places], waiting.to_start[places:]
        self._using[waiting.ask.adapter] += len(begun)
        for tokens in begun:
            entry = (self._steps + tokens, next(self._order), waiting)
            heapq.heappush(self._running, entry)

    def _prefill(self, ask: Ask) -> None:
        cached = min(self._prefixes.pop(ask.conversation, 0), ask.prompt_tokens)
        self.prompt_tokens += ask.prompt_tokens
        self.cached_tokens += cached
        self._steps_known_at_s += (ask.prompt_tokens - cached) * self._costs.prefill_token_s
        self._prefixes[ask.conversation] = ask.prompt_tokens

    def _plan_next(self) -> None:
        """Look again when the next sequence ends, unless something else comes before."""
        self._plan += 1
        if self._running:
            plan = self._plan
            left = max(0.0, self._running[0][0] - self._steps)
            self._clock.at(self._steps_known_at_s + left * self._step_s(), lambda: self._end(plan))

    def _end(self, plan: int) -> None:
        if plan != self._plan:
            return
        self._catch_up()
        # Those that end at the same step do so in spite of rounding.
        finished: list[_Waiting] = []
        while self._running and self._running[0][0] <= self._steps + 1e-6:
            finished.append(heapq.heappop(self._running)[2])
        for waiting in finished:
            self._finish_sample(waiting)
        self._admit()
        self._plan_next()

    def _finish_sample(self, waiting: _Waiting) -> None:
        ask = waiting.ask
        self.load -= 1
        self._using[ask.adapter] -= 1
        waiting.unfinished -= 1
        if not waiting.unfinished:
            self._remember_prefix(ask)
            self._clock.at(self._clock.now_s, waiting.ended)

    def _remember_prefix(self, ask: Ask) -> None:
        """The next turn's prompt is taken to begin with this prompt and its longest sample."""
        self._prefixes.pop(ask.conversation, None)
        self._prefixes[ask.conversation] = ask.prompt_tokens + max(ask.output_tokens)
        while sum(self._prefixes.values()) > self._costs.cache_tokens:
            self._prefixes.popitem(last=False)
