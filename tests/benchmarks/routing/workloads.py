"""Clients, as processes. Each draws from a generator of its own, so that what it asks for does not
depend on how it is served."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from random import Random

from tests.benchmarks.routing.clock import Process, Sleep, Together, Until
from tests.benchmarks.routing.engine import Ask

Send = Callable[[Ask], Until]
Workload = Callable[[Send, int, float], Iterator[Process]]
"""The clients, given how to send, a seed, and how crowded it is (1: as each one says)."""

_ADAPTERS = 64
_LONGEST = 4096


def chat(send: Send, seed: int, crowd: float) -> Iterator[Process]:
    """Users with conversations of several turns, one sampling session each, on 64 adapters of which
    a few are popular."""
    for user in range(round(400 * crowd)):
        yield _user(send, f"user{user}", Random(f"{seed} user{user}"))


def rl(send: Send, seed: int, crowd: float) -> Iterator[Process]:
    """Six runs that sample 64 groups of 8 at once, train, and sample the next from new weights:
    one sampling session a step."""
    for run in range(round(6 * crowd)):
        yield _run(send, f"run{run}", Random(f"{seed} run{run}"), groups=64, samples=8, turns=1)


def agents(send: Send, seed: int, crowd: float) -> Iterator[Process]:
    """Six runs of 64 trajectories of six turns with tools between them, one sampling session a
    step; the groups of the same task are trajectories of their own."""
    for run in range(round(6 * crowd)):
        yield _run(send, f"run{run}", Random(f"{seed} run{run}"), groups=64, samples=1, turns=6)


def mixed(send: Send, seed: int, crowd: float) -> Iterator[Process]:
    yield from chat(send, seed, crowd / 2)
    yield from rl(send, seed, crowd / 3)
    yield from agents(send, seed, crowd / 3)


WORKLOADS: dict[str, Workload] = {"chat": chat, "rl": rl, "agents": agents, "mixed": mixed}


def _user(send: Send, name: str, random: Random) -> Process:
    yield Sleep(random.uniform(0, 30))
    conversation = 0
    while True:
        conversation += 1
        key = f"{name}-{conversation}"
        turns = 1 + int(random.expovariate(1 / 4))
        yield from _turns(send, _popular(random), key, key, turns, random, think_s=10.0)


def _run(
    send: Send, name: str, random: Random, *, groups: int, samples: int, turns: int
) -> Process:
    yield Sleep(random.uniform(0, 20))
    step = 0
    while True:
        step += 1
        weights = f"{name}-{turns}-{step}"
        yield Together(
            [
                _turns(
                    send,
                    weights,
                    weights,
                    f"{weights}-{group}",
                    turns,
                    Random(random.random()),
                    samples=samples,
                    think_s=1.0,
                )
                for group in range(groups)
            ]
        )
        yield Sleep(10.0)


def _turns(
    send: Send,
    adapter: str,
    session: str,
    conversation: str,
    turns: int,
    random: Random,
    *,
    samples: int = 1,
    think_s: float,
) -> Process:
    """Every prompt begins with the prompt and the answer before it."""
    prompt_tokens = 0
    for _ in range(turns):
        prompt_tokens += _long_tailed(random, median=300, sigma=0.8)
        outputs = [_long_tailed(random, median=150, sigma=1.2) for _ in range(samples)]
        yield send(
            Ask(
                adapter=adapter,
                session=session,
                conversation=conversation,
                prompt_tokens=prompt_tokens,
                output_tokens=tuple(outputs),
            )
        )
        prompt_tokens += outputs[0]
        yield Sleep(random.expovariate(1 / think_s))


def _long_tailed(random: Random, *, median: int, sigma: float) -> int:
    return min(_LONGEST, 1 + round(random.lognormvariate(math.log(median), sigma)))


def _popular(random: Random) -> str:
    """The n-th adapter 1/n times as often as the first."""
    weights = [1 / (n + 1) for n in range(_ADAPTERS)]
    return f"adapter{random.choices(range(_ADAPTERS), weights)[0]}"
