"""The event loop with real policies: times by hand, conservation, determinism, promises."""

from __future__ import annotations

from collections import defaultdict

import numpy as np
import pytest

from server.core.ids import RequestId
from server.core.requests import Job
from server.core.schedule import Tick
from server.simulate.clients import Client
from server.simulate.loop import Measured, Simulation
from server.simulate.machines import LAPTOP, Machine
from server.simulate.policies import POLICIES, FairShare, Policy
from server.simulate.study import simulated
from server.simulate.workloads import crowd
from tests.unit.simulate.small import MACHINE, client, flood, one_step, replaced


class Recorded:
    """A policy that remembers what went in and what came out."""

    def __init__(self, policy: Policy) -> None:
        self._policy = policy
        self.added: list[Job] = []
        self.taken: dict[RequestId, list[int]] = defaultdict(list)
        """The datums of each request, as they were taken."""
        self.order: list[Job] = []

    def add(self, job: Job, now: float) -> None:
        self.added.append(job)
        self._policy.add(job, now)

    def take(self, now: float) -> Tick | None:
        tick = self._policy.take(now)
        for one in tick.slices if tick else ():
            self.taken[one.job.request] += range(one.first, one.last)
            if not one.more:
                self.order.append(one.job)
        return tick


def run(
    clients: list[Client], machine: Machine = MACHINE, policy: str = "Hearth", seconds: float = 1e6
) -> Measured:
    weights = {client.run: client.tenant.weight for client in clients}
    return Simulation(
        clients, machine, POLICIES[policy](machine.token_budget, weights), seconds
    ).run()


def test_two_that_come_together_share_a_pass_and_a_step():
    both = [client(0, one_step(30)), client(1, one_step(10, 10))]
    measured = run(both)

    # Half a round trip, a pass of 50 tokens and two adapters, their steps, half a round trip.
    expected = 0.01 + (1 + 0.5 + 0.2) + (2 * 0.25) + 0.01
    assert [one.latencies for one in both] == [[pytest.approx(expected)]] * 2
    assert measured.num_ticks == 2
    assert measured.busy_s == pytest.approx(2.2)
    assert measured.shares.got.tolist() == [30, 20]


@pytest.mark.parametrize(
    ("policy", "flooded", "small"),
    [
        # Passes of 60, 60, 50, a step (5.26), then 60 and a step. The newcomer loses the tie.
        ("Hearth", 7.22, 5.27 - 0.5),
        # 60, 60, 60, its step (5.36), which is older than the 50 that come next.
        ("first come", 5.37, 7.22 - 0.5),
        # 60, 60, 50, 60, then the steps one by one, the small one's first.
        ("in turn", 7.22, 6.97 - 0.5),
    ],
)
def test_a_small_step_beside_three_batches(policy, flooded, small):
    """A pass of 60 tokens takes 1.7 s, one of 50 takes 1.6 s, a step 0.25 s."""
    clients = [client(0, flood([(60,)] * 3)), client(1, one_step(50, pause_s=0.5))]
    run(clients, policy=policy)
    assert clients[0].latencies == [pytest.approx(flooded)]
    assert clients[1].latencies == [pytest.approx(small)]


def test_the_next_round_begins_a_pause_after_the_result():
    one = client(0, one_step(10), one_step(20, pause_s=3.0))
    measured = run([one])
    first = 0.02 + 1.2 + 0.25
    assert one.latencies == [pytest.approx(first), pytest.approx(first + 0.1)]
    assert measured.ready_s == pytest.approx(2 * 1.45 + 0.1)


def test_adapters_that_are_not_on_the_device_are_brought_first():
    one = client(0, one_step(10), one_step(10), rank=2)
    run([one], replaced(rank_bytes=10, adapter_bytes=100, transfer_bytes_s=10))
    assert one.latencies[0] - one.latencies[1] == pytest.approx(2.0)


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("seed", range(3))
def test_everything_submitted_is_served_once_in_its_runs_order(policy, seed):
    tenants = crowd(12, seed)
    clients = [Client.of(one, one.rounds(LAPTOP.sequence_tokens)) for one in tenants]
    recorded = Recorded(POLICIES[policy](LAPTOP.token_budget, {}))
    Simulation(clients, LAPTOP, recorded, 600.0).run()

    assert recorded.added
    assert recorded.taken == {job.request: list(range(len(job.lengths))) for job in recorded.added}
    for one in clients:
        numbers = [job.seq for job in recorded.order if job.run == one.run]
        assert numbers == list(range(len(numbers)))
        assert one.idle


@pytest.mark.parametrize("policy", POLICIES)
def test_the_machine_is_never_idle_while_work_is_ready(policy):
    _, measured = simulated(crowd(20, 0), LAPTOP, 1800.0, policy)
    assert 0 < measured.busy_s == measured.ready_s <= 1800.0


def test_a_seed_repeats_everything_and_another_does_not():
    first, again, other = (
        [one.latencies for one in simulated(crowd(20, seed), LAPTOP, 600.0, "Hearth")[0]]
        for seed in (5, 5, 6)
    )
    assert first == again != other


def test_weights_divide_the_machine():
    clients = [client(0, flood([(10,)] * 99)), client(1, flood([(10,)] * 99), weight=2.0)]
    measured = run(clients, seconds=15.0)
    got = measured.shares.got
    assert got[1] / got[0] == pytest.approx(2.0, rel=0.1)
    assert measured.shares.index(0.0) > 0.99


@pytest.mark.parametrize("num_datums", [1, 2, 4, 8, 16])
def test_a_flood_delays_a_small_tenant_by_its_fair_share_and_one_microbatch(num_datums):
    """Where a tick is half of a microbatch: one such tick may be under way, and in every one after
    it the small tenant has half."""
    microbatch_s = LAPTOP.pass_s + 2 * LAPTOP.token_budget * LAPTOP.token_s
    rounds = [one_step(*[64] * num_datums)] * 40

    alone, beside = client(0, *rounds, rank=32), client(0, *rounds, rank=32)
    run([alone], LAPTOP)
    run([beside, client(1, flood([(64,) * 8] * 200), rank=32)], LAPTOP)

    p95_alone, p95 = (np.percentile(one.latencies, 95) for one in (alone, beside))
    assert p95 <= 2 * p95_alone + microbatch_s


def test_a_flood_holds_everybody_up_without_fair_share():
    """So the test above measures the scheduler, and not the load."""
    small = client(0, one_step(64, pause_s=60.0), rank=32)
    run([small, client(1, flood([(64,) * 8] * 200), rank=32)], LAPTOP, "first come")
    assert small.latencies[0] > 600


def test_a_policy_that_loses_work_is_found_out():
    class Forgetful(FairShare):
        def take(self, now: float) -> Tick | None:
            return None

    lost = Simulation([client(0, one_step(10))], MACHINE, Forgetful(100, {}), 10.0)
    with pytest.raises(AssertionError, match="left something undone"):
        lost.run()
