"""The simulation of routing policies, against arithmetic."""

from __future__ import annotations

import pytest

from backends.sampling.vllm.routing import Choose, choose
from tests.benchmarks.routing import policies
from tests.benchmarks.routing.clock import Clock, Process, Sleep, Together
from tests.benchmarks.routing.engine import COSTS as PRESETS
from tests.benchmarks.routing.engine import Ask, Costs, Engine
from tests.benchmarks.routing.simulation import Fleet, Report, simulate
from tests.benchmarks.routing.workloads import WORKLOADS

COSTS = Costs(
    step_s=1.0,
    sequence_s=0.5,
    prefill_token_s=0.25,
    adapter_load_s=3.0,
    max_running=2,
    adapter_slots=1,
    cache_tokens=100,
)


def _ask(conversation: str, *outputs: int, adapter: str = "a", prompt: int = 8) -> Ask:
    return Ask(
        adapter=adapter,
        session=conversation,
        conversation=conversation,
        prompt_tokens=prompt,
        output_tokens=outputs,
    )


def _ends(*asks: Ask, costs: Costs = COSTS) -> tuple[list[float], Engine]:
    """When each of them ended, that were all sent at 0 s."""
    clock = Clock()
    engine = Engine("r", clock, costs)
    ends = [0.0] * len(asks)

    def note(i: int) -> None:
        ends[i] = clock.now_s

    for i, ask in enumerate(asks):
        engine.submit(ask, lambda i=i: note(i))
    clock.run()
    return ends, engine


def test_a_request_alone_pays_for_adapter_prompt_and_steps():
    ends, engine = _ends(_ask("x", 10))
    assert ends == [pytest.approx(3 + 8 * 0.25 + 10 * 1.5)]
    assert (engine.load, engine.adapter_loads) == (0, 1)


def test_sequences_share_steps_and_the_longer_goes_on_faster_alone():
    ends, _ = _ends(_ask("x", 4, 10))
    assert ends == [pytest.approx(3 + 2 + 4 * 2.0 + 6 * 1.5)]


def test_what_finds_no_place_waits_for_one():
    ends, _ = _ends(_ask("x", 4, 10), _ask("y", 2))
    begins = 3 + 2 + 4 * 2.0
    assert ends[1] == pytest.approx(begins + 2 + 2 * 2.0)
    assert ends[0] == pytest.approx(ends[1] + 4 * 1.5)


def test_samples_beyond_the_places_wait_and_share_the_prefill():
    ends, engine = _ends(_ask("x", 4, 4, 4))
    assert ends == [pytest.approx(3 + 2 + 4 * 2.0 + 4 * 1.5)]
    assert engine.prompt_tokens == 8


def test_another_adapter_waits_for_the_slot_and_lets_others_pass():
    ends, engine = _ends(_ask("x", 4), _ask("y", 1, adapter="b"), _ask("z", 4))
    assert ends[0] == ends[2] == pytest.approx(3 + 2 + 2 + 4 * 2.0)
    assert ends[1] == pytest.approx(ends[0] + 3 + 2 + 1.5)
    assert engine.adapter_loads == 2


def test_the_next_turn_pays_only_for_what_is_new():
    clock = Clock()
    fleet = Fleet(clock, COSTS, 1, choose, lambda ask: ask.session)

    def turns() -> Process:
        yield fleet.send(_ask("x", 10))
        yield fleet.send(_ask("x", 10, prompt=8 + 10 + 4))

    clock.start(turns())
    clock.run()
    assert fleet.latencies_s == pytest.approx([3 + 2 + 15, 4 * 0.25 + 15])
    assert fleet.tokens == 20


def test_processes_sleep_and_wait_for_each_other():
    clock = Clock()
    seen: list[float] = []

    def nap(seconds: float) -> Process:
        yield Sleep(seconds)

    def outer() -> Process:
        yield Together([nap(2), nap(5), nap(3)])
        seen.append(clock.now_s)
        yield Sleep(1)
        seen.append(clock.now_s)

    clock.start(outer())
    clock.run()
    assert seen == [5.0, 6.0]


def _report(workload: str, policy: Choose, seconds: float) -> Report:
    return simulate(
        WORKLOADS[workload],
        policy,
        lambda ask: ask.session,
        costs=PRESETS["gpu"],
        replicas=4,
        seed=0,
        seconds=seconds,
        crowd=1.0,
    )


def _others() -> tuple[Choose, ...]:
    return policies.consistent_hashing(), policies.round_robin(), policies.least_loaded()


@pytest.mark.parametrize("workload", ["chat", "agents", "mixed"])
def test_ours_generates_most_where_prefixes_come_back(workload):
    ours = _report(workload, choose, 120.0).tokens_per_s
    assert all(ours > _report(workload, other, 120.0).tokens_per_s for other in _others())


def test_ours_loses_little_where_there_is_nothing_to_come_back_to():
    ours = _report("rl", choose, 600.0).tokens_per_s
    assert all(ours > 0.98 * _report("rl", other, 600.0).tokens_per_s for other in _others())


def test_a_simulation_repeats_itself():
    assert _report("chat", choose, 60.0) == _report("chat", choose, 60.0)
