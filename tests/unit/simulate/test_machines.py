"""What a tick costs: the formula, and that it agrees with what was published."""

from __future__ import annotations

import pytest

from server.core.ids import RunId
from server.core.requests import Kind
from server.simulate.machines import MACHINES, Residency
from tests.unit.simulate.small import MACHINE, replaced


def test_a_pass_costs_its_start_its_tokens_and_the_ranks_in_it():
    assert MACHINE.seconds(Kind.FORWARD_BACKWARD, 50, [1, 4]) == pytest.approx(1 + 0.5 + 0.5)


def test_optimizer_steps_cost_their_ranks():
    assert MACHINE.seconds(Kind.OPTIM_STEP, 0, [1, 4]) == pytest.approx(1.25)


@pytest.mark.parametrize("name", MACHINES)
def test_no_machine_is_faster_than_its_tokens_allow(name):
    machine = MACHINES[name]
    tick = machine.seconds(Kind.FORWARD_BACKWARD, machine.token_budget, [32])
    assert 0.9 < machine.token_budget * machine.token_s / tick < 1


def test_an_h200_trains_as_fast_as_published_but_for_reading_the_weights():
    """NeMo AutoModel: 32 sequences of 4,096 tokens of Llama 3 8B in 10.51 s."""
    machine = MACHINES["h200"]
    passes = 32 * 4096 / machine.token_budget
    seconds = passes * machine.seconds(Kind.FORWARD_BACKWARD, machine.token_budget, [])
    assert seconds == pytest.approx(10.51 + passes * 2 * 16.06e9 / 4.8e12, rel=1e-3)


def test_eight_devices_share_the_tokens_but_each_reads_the_weights():
    one, eight = MACHINES["h200"], MACHINES["h200-node"]
    pass_of_one = one.seconds(Kind.FORWARD_BACKWARD, 1000, [32])
    pass_of_eight = eight.seconds(Kind.FORWARD_BACKWARD, 8000, [32] * 8)
    assert pass_of_eight == pytest.approx(pass_of_one)


def brought(residency: Residency, *runs: str) -> float:
    return residency.bring({RunId(run): 1 for run in runs})


def test_what_is_on_the_device_is_not_brought_again():
    residency = Residency(replaced(rank_bytes=10, adapter_bytes=20, transfer_bytes_s=10))
    assert brought(residency, "a", "b") == pytest.approx(2.0)
    assert brought(residency, "a", "b") == 0.0


def test_who_was_used_longest_ago_makes_room():
    residency = Residency(replaced(rank_bytes=10, adapter_bytes=20, transfer_bytes_s=10))
    brought(residency, "a")
    brought(residency, "b")
    brought(residency, "a", "c")
    assert brought(residency, "a", "c") == 0.0
    assert brought(residency, "b") == pytest.approx(1.0)


def test_a_tick_of_more_than_fits_still_runs():
    residency = Residency(replaced(rank_bytes=10, adapter_bytes=20, transfer_bytes_s=10))
    assert brought(residency, "a", "b", "c") == pytest.approx(3.0)
    assert brought(residency, "a") == 0.0


def test_adapters_of_higher_rank_take_more_room_and_longer():
    residency = Residency(replaced(rank_bytes=10, adapter_bytes=50, transfer_bytes_s=10))
    assert residency.bring({RunId("a"): 4}) == pytest.approx(4.0)
    assert residency.bring({RunId("b"): 2}) == pytest.approx(2.0)
    assert residency.bring({RunId("a"): 4}) == pytest.approx(4.0)
