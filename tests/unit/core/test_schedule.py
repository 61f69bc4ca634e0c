"""Promises of the scheduler, as properties of random crowds of tenants."""

from __future__ import annotations

import itertools
from collections import defaultdict

from hypothesis import given, settings
from hypothesis import strategies as st

from server.core.fairness import VirtualCounters
from server.core.requests import PASS_KINDS, Job, Kind
from server.core.schedule import FIXED_COST_TOKENS, Served, Tick, next_tick
from tests.unit.core.jobs import job

LARGEST = 60
BUDGET = 100

kinds = st.sampled_from(
    [Kind.FORWARD_BACKWARD, Kind.FORWARD_BACKWARD, Kind.FORWARD, Kind.OPTIM_STEP, Kind.SAVE]
)


@st.composite
def crowds(draw: st.DrawFn) -> dict[str, list[Job]]:
    """Ready jobs of each run; runs `a-0`, `a-1` belong to tenant `a`."""
    crowd = {}
    for tenant in draw(st.sets(st.sampled_from("abcd"), max_size=4)):
        for number in range(draw(st.integers(1, 3))):
            run = f"{tenant}-{number}"
            shapes = draw(
                st.lists(st.tuples(kinds, st.integers(1, 2 * BUDGET)), min_size=0, max_size=6)
            )
            crowd[run] = [
                job(seq, kind, tokens, run=run) for seq, (kind, tokens) in enumerate(shapes)
            ]
    return crowd


def nobody() -> Served:
    return Served(VirtualCounters(), VirtualCounters())


class Server:
    """The dispatcher without a device: choose, take, charge."""

    def __init__(self, ready: dict[str, list[Job]], budget: int = BUDGET) -> None:
        self.ready = {run: list(jobs) for run, jobs in ready.items()}
        self.budget = budget
        self.served = nobody()

    def tick(self) -> Tick | None:
        heads = [jobs[0] for jobs in self.ready.values() if jobs]
        self.served.tenants.set_active(head.tenant for head in heads)
        self.served.runs.set_active(head.run for head in heads)
        tick = next_tick(self.ready, self.served, self.budget)
        for one in tick.jobs if tick else ():
            assert self.ready[one.run].pop(0) is one, "a job overtook another of its run"
            self.served.charge(one)
        return tick


@given(crowds())
def test_every_job_is_taken_once_in_its_runs_order_until_none_is_left(crowd):
    server, taken = Server(crowd), defaultdict(list)
    while (tick := server.tick()) is not None:
        assert tick.jobs
        for one in tick.jobs:
            taken[one.run].append(one)

    assert {run: jobs for run, jobs in crowd.items() if jobs} == taken


@given(crowds())
def test_a_pass_keeps_the_budget_unless_its_first_job_alone_is_above_it(crowd):
    server = Server(crowd)
    while (tick := server.tick()) is not None:
        if tick.kind in PASS_KINDS:
            assert len(tick.jobs) == 1 or sum(one.tokens for one in tick.jobs) <= BUDGET


@given(crowds())
def test_what_goes_together_can_go_together(crowd):
    """A pass holds passes, a step at most one a run, and everything else goes alone."""
    server = Server(crowd)
    while (tick := server.tick()) is not None:
        found = {one.kind for one in tick.jobs}
        if tick.kind in PASS_KINDS:
            assert found <= PASS_KINDS
        elif tick.kind is Kind.OPTIM_STEP:
            assert found == {Kind.OPTIM_STEP}
            assert len({one.run for one in tick.jobs}) == len(tick.jobs)
        else:
            assert len(tick.jobs) == 1


@given(crowds())
def test_something_runs_whenever_anything_is_ready(crowd):
    assert (next_tick(crowd, nobody(), BUDGET) is None) == (not any(crowd.values()))


@given(crowds())
def test_choosing_changes_nothing(crowd):
    served = nobody()
    first = next_tick(crowd, served, BUDGET)
    assert next_tick(crowd, served, BUDGET) == first
    assert all(served.tenants.served(tenant) == 0.0 for tenant in "abcd")


@given(crowds())
def test_nothing_behind_a_step_is_in_the_pass_before_it(crowd):
    tick = next_tick(crowd, nobody(), BUDGET)
    for one in tick.jobs if tick else ():
        before = crowd[one.run][: one.seq]
        assert all(earlier.kind in PASS_KINDS for earlier in before)


def test_every_run_that_waits_for_a_step_is_stepped_together():
    crowd = {f"{tenant}-0": [job(0, Kind.OPTIM_STEP, run=f"{tenant}-0")] for tenant in "abc"}
    crowd["d-0"] = [job(0, run="d-0")]
    server = Server(crowd)
    assert {one.run for one in server.tick().jobs} == {"a-0", "b-0", "c-0"}


def test_a_small_job_does_not_jump_the_queue_when_the_least_served_does_not_fit():
    """Otherwise a large job could be passed by for ever."""
    crowd = {
        "a-0": [job(0, tokens=60, run="a-0")],
        "b-0": [job(0, tokens=60, run="b-0")],
        "c-0": [job(0, tokens=5, run="c-0")],
    }
    served = nobody()
    served.tenants.charge("b", 10)
    served.tenants.charge("c", 20)

    assert [one.run for one in next_tick(crowd, served, BUDGET).jobs] == ["a-0"]


endless = st.lists(st.integers(1, LARGEST), min_size=1, max_size=5)


@given(st.dictionaries(st.sampled_from("abcd"), endless, min_size=2), st.integers(10, 60))
@settings(max_examples=50)
def test_tenants_that_always_have_work_are_served_alike(sizes, ticks):
    """Their counters differ by one largest job and its fixed cost at most: nobody starves."""
    server = Server({})
    numbers = itertools.count()
    shapes = {tenant: itertools.cycle(tokens) for tenant, tokens in sizes.items()}
    for _ in range(ticks):
        for tenant, shape in shapes.items():
            queue = server.ready.setdefault(f"{tenant}-0", [])
            while len(queue) < BUDGET:
                queue.append(job(next(numbers), tokens=next(shape), run=f"{tenant}-0"))
        server.tick()

        counters = [server.served.tenants.served(tenant) for tenant in shapes]
        assert max(counters) - min(counters) <= LARGEST + FIXED_COST_TOKENS


@given(
    flood=st.lists(st.integers(1, 2 * BUDGET), min_size=30, max_size=60),
    before=st.integers(0, 10),
    runs=st.integers(1, 5),
)
def test_a_flood_delays_a_small_job_by_one_tick_at_most(flood, before, runs):
    crowd = {f"flood-{n}": [] for n in range(runs)}
    for seq, tokens in enumerate(flood):
        run = f"flood-{seq % runs}"
        crowd[run].append(job(seq, tokens=tokens, run=run))
    server = Server(crowd)
    for _ in range(before):
        server.tick()
    small = job(0, tokens=4, run="small-0")
    server.ready["small-0"] = [small]

    ticks = [server.tick(), server.tick()]
    assert any(small in tick.jobs for tick in ticks if tick)


def test_within_a_tenant_the_least_served_run_goes_first():
    crowd = {run: [job(0, run=run)] for run in ("a-0", "a-1")}
    served = nobody()
    served.runs.charge("a-0", 1)
    assert next_tick(crowd, served, budget := 10).jobs[0].run == "a-1"
    assert budget == 10


def test_a_tenant_with_many_runs_gets_no_more_than_one_with_a_single_run():
    crowd = {
        run: [job(seq, tokens=10, run=run) for seq in range(50)]
        for run in ("one-0", *(f"many-{n}" for n in range(9)))
    }
    server, tokens = Server(crowd, budget=20), defaultdict(int)
    for _ in range(20):
        for one in server.tick().jobs:
            tokens[one.tenant] += one.tokens

    assert tokens["one"] == tokens["many"]
