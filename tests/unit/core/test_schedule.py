"""Promises of the scheduler, as properties of random crowds of tenants."""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Mapping

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from server.core.fairness import GroupedCounters, VirtualCounters
from server.core.ids import RunId, TenantId
from server.core.requests import FIXED_COST_TOKENS, PASS_KINDS, Job, Kind, Slice
from server.core.schedule import TURNS_PER_TICK, Served, Tick, datums_within, next_tick
from server.core.sequence import RunQueue
from tests.unit.core.jobs import job

BUDGET = 100
QUANTUM = BUDGET // TURNS_PER_TICK
LARGEST = 60

kinds = st.sampled_from(
    [Kind.FORWARD_BACKWARD, Kind.FORWARD_BACKWARD, Kind.FORWARD, Kind.OPTIM_STEP, Kind.SAVE]
)
data = st.lists(st.integers(1, 2 * BUDGET), max_size=8).map(tuple)
small_data = st.lists(st.integers(1, LARGEST), min_size=1, max_size=8).map(tuple)


@st.composite
def crowds(draw: st.DrawFn) -> dict[str, list[Job]]:
    """Jobs of each run, in order; runs `a-0`, `a-1` belong to tenant `a`."""
    crowd = {}
    for tenant in draw(st.sets(st.sampled_from("abcd"), max_size=4)):
        for number in range(draw(st.integers(1, 3))):
            run = f"{tenant}-{number}"
            shapes = draw(st.lists(st.tuples(kinds, data), max_size=5))
            crowd[run] = [
                job(seq, kind, lengths, run=run) for seq, (kind, lengths) in enumerate(shapes)
            ]
    return crowd


def nobody(weights: Mapping[TenantId, float] | None = None) -> Served:
    return Served(VirtualCounters(weights), GroupedCounters())


def ready(crowd: Mapping[str, list[Job]]) -> dict[RunId, list[Slice]]:
    return {RunId(run): [one.whole for one in jobs] for run, jobs in crowd.items()}


class Server:
    """The dispatcher without a device: choose, take, charge."""

    def __init__(
        self,
        crowd: Mapping[str, list[Job]],
        budget: int = BUDGET,
        weights: Mapping[TenantId, float] | None = None,
    ) -> None:
        self.queues: defaultdict[str, RunQueue] = defaultdict(RunQueue)
        self.budget = budget
        self.served = nobody(weights)
        self.last: Kind | None = None
        for jobs in crowd.values():
            for one in jobs:
                self.submit(one)

    def submit(self, one: Job) -> None:
        self.queues[one.run].add(one, now=0.0)

    def tick(self) -> Tick | None:
        ready = {RunId(run): list(queue.ready(0.0, 0.0)) for run, queue in self.queues.items()}
        self.served.set_active([slices[0].job for slices in ready.values() if slices])
        tick = next_tick(ready, self.served, self.budget, self.last)
        self.last = tick.kind if tick else None
        for one in tick.slices if tick else ():
            self.queues[one.job.run].take(one)
            self.served.charge(one)
        return tick

    def ticks(self) -> list[Tick]:
        return list(iter(self.tick, None))


@given(crowds())
def test_every_datum_runs_once_in_its_runs_order_until_none_is_left(crowd):
    taken = defaultdict(list)
    for tick in Server(crowd).ticks():
        for one in tick.slices:
            if one.job.lengths:
                taken[one.job.run] += [(one.job.seq, n) for n in range(one.first, one.last)]
                assert one.first < one.last, "an empty slice of what has datums"
            else:
                taken[one.job.run].append((one.job.seq, None))

    expected = {
        run: [(one.seq, n) for one in jobs for n in (range(len(one.lengths)) or [None])]
        for run, jobs in crowd.items()
        if jobs
    }
    assert taken == expected


@given(crowds())
def test_a_run_ends_a_request_before_it_begins_another(crowd):
    for tick in Server(crowd).ticks():
        for before, after in itertools.combinations(tick.slices, 2):
            assert before.job.run != after.job.run or not before.more


@given(crowds())
def test_a_pass_keeps_the_budget_unless_it_is_one_datum_that_alone_is_above_it(crowd):
    for tick in Server(crowd).ticks():
        if tick.kind in PASS_KINDS and tick.tokens > BUDGET:
            [alone] = tick.slices
            assert alone.last - alone.first == 1


@given(crowds())
def test_a_pass_is_full_unless_somebodys_next_datum_does_not_fit(crowd):
    """What is left over is always less than a datum that waits for the next tick."""
    server = Server(crowd)
    while (tick := server.tick()) is not None:
        if tick.kind not in PASS_KINDS:
            continue
        left = BUDGET - tick.tokens
        heads = [next(queue.ready(0.0, 0.0), None) for queue in server.queues.values()]
        waiting = [
            (one.job.lengths or (0,))[one.first]
            for one in heads
            if one is not None and one.job.kind in PASS_KINDS
        ]
        assert not waiting or max(waiting) > left


@given(crowds())
def test_what_goes_together_can_go_together(crowd):
    """A pass holds passes, a step at most one a run, and everything else goes alone."""
    for tick in Server(crowd).ticks():
        found = {one.kind for one in tick.jobs}
        if tick.kind in PASS_KINDS:
            assert found <= PASS_KINDS
            assert len(set(tick.jobs)) == len(tick.jobs), "a request is in it twice"
        elif tick.kind is Kind.OPTIM_STEP:
            assert found == {Kind.OPTIM_STEP}
            assert len({one.run for one in tick.jobs}) == len(tick.jobs)
        else:
            assert len(tick.jobs) == 1


@given(crowds())
def test_something_runs_whenever_anything_is_ready(crowd):
    tick = next_tick(ready(crowd), nobody(), BUDGET)
    assert (tick is None) == (not any(crowd.values()))
    assert tick is None or tick.slices


@given(crowds())
def test_choosing_changes_nothing(crowd):
    served = nobody()
    first = next_tick(ready(crowd), served, BUDGET)
    assert next_tick(ready(crowd), served, BUDGET) == first
    assert all(served.tenants.served(TenantId(tenant)) == 0.0 for tenant in "abcd")


@given(crowds())
def test_nothing_behind_a_step_is_in_the_pass_before_it(crowd):
    tick = next_tick(ready(crowd), nobody(), BUDGET)
    for one in tick.jobs if tick else ():
        before = crowd[one.run][: one.seq]
        assert all(earlier.kind in PASS_KINDS for earlier in before)


def test_no_more_is_read_of_a_queue_than_a_tick_has_room_for():
    asked = []

    def endless():
        for seq in itertools.count():
            asked.append(seq)
            yield job(seq, lengths=(BUDGET,)).whole

    next_tick({RunId("run"): endless()}, nobody(), BUDGET)
    assert asked == [0, 1]


def test_every_run_that_waits_for_a_step_is_stepped_together():
    crowd = {f"{tenant}-0": [job(0, Kind.OPTIM_STEP, run=f"{tenant}-0")] for tenant in "abc"}
    crowd["d-0"] = [job(0, run="d-0")]
    tick = Server(crowd).tick()
    assert tick is not None
    assert {one.run for one in tick.jobs} == {"a-0", "b-0", "c-0"}


def test_nobody_jumps_the_queue_when_the_least_served_does_not_fit():
    """Otherwise a large datum could be passed by for ever."""
    crowd = {
        "a-0": [job(0, lengths=(60,), run="a-0")],
        "b-0": [job(0, lengths=(60,), run="b-0")],
        "c-0": [job(0, lengths=(5,), run="c-0")],
    }
    served = nobody()
    served.tenants.charge(TenantId("b"), 10)
    served.tenants.charge(TenantId("c"), 20)

    tick = next_tick(ready(crowd), served, BUDGET)
    assert tick is not None
    assert [one.run for one in tick.jobs] == ["a-0"]


def test_whoever_is_alone_gets_a_tick_in_one_piece():
    [tick] = Server({"a-0": [job(0, lengths=(10,) * 10, run="a-0")]}).ticks()
    assert tick.slices == (job(0, lengths=(10,) * 10, run="a-0").whole,)


def test_a_large_request_is_shared_out_with_those_of_others():
    """A quantum of 320 / 32 tokens is two datums of 5."""
    crowd = {run: [job(0, lengths=(5,) * 40, run=run)] for run in ("a-0", "b-0")}
    shares = [
        [(one.job.run, one.first, one.last, one.more) for one in tick.slices]
        for tick in Server(crowd, budget=32 * 10).ticks()
    ]
    assert shares == [
        [("a-0", 0, 32, True), ("b-0", 0, 32, True)],
        [("a-0", 32, 40, False), ("b-0", 32, 40, False)],
    ]


def test_steps_go_before_passes_but_not_twice_in_a_row():
    """Who has been charged for a batch need not wait for its step until others had as much; and
    no flood of steps keeps the passes away."""
    crowd = {
        "a-0": [job(0, lengths=(50,), run="a-0"), job(1, Kind.OPTIM_STEP, run="a-0")],
        "b-0": [job(seq, lengths=(BUDGET,), run="b-0") for seq in range(4)],
        "c-0": [job(seq, Kind.OPTIM_STEP, run="c-0") for seq in range(3)],
    }
    ticks = [[f"{one.run}:{one.seq}" for one in tick.jobs] for tick in Server(crowd).ticks()]
    assert ticks == [
        ["c-0:0"],
        ["a-0:0"],
        ["a-0:1", "c-0:1"],
        ["b-0:0"],
        ["c-0:2"],
        ["b-0:1"],
        ["b-0:2"],
        ["b-0:3"],
    ]


@pytest.mark.parametrize(
    ("lengths", "first", "room", "last"),
    [((), 0, 10, 0), ((50,), 0, 10, 1), ((5, 5, 1), 0, 10, 2), ((5, 5, 1), 2, 0, 3)],
)
def test_as_many_datums_as_fit_but_one(lengths: tuple[int, ...], first: int, room: int, last: int):
    assert datums_within(lengths, first, room) == last


class Endless:
    """Tenants, a run each, that always have passes of these shapes waiting."""

    def __init__(
        self,
        shapes: Mapping[str, list[tuple[int, ...]]],
        weights: Mapping[TenantId, float] | None = None,
    ) -> None:
        self.server = Server({}, weights=weights)
        self._shapes = {f"{tenant}-0": itertools.cycle(own) for tenant, own in shapes.items()}
        self._seqs = {run: itertools.count() for run in self._shapes}

    def tick(self) -> Tick:
        for run, shape in self._shapes.items():
            while len(self.server.queues[run]) < BUDGET:
                self.server.submit(job(next(self._seqs[run]), lengths=next(shape), run=run))
        tick = self.server.tick()
        assert tick is not None
        return tick


shapes = st.dictionaries(
    st.sampled_from("abcd"), st.lists(small_data, min_size=1, max_size=4), min_size=2
)
LARGEST_TURN = max(QUANTUM, LARGEST) + FIXED_COST_TOKENS


@given(shapes, st.integers(10, 40), st.dictionaries(st.sampled_from("abcd"), st.integers(1, 5)))
@settings(max_examples=50)
def test_tenants_that_always_have_work_are_served_by_their_weights(sizes, ticks, weights):
    """They differ by one turn at most: a quantum or a datum, and what a request costs beside it."""
    crowd = Endless(sizes, weights)
    for _ in range(ticks):
        crowd.tick()
        counters = [crowd.server.served.tenants.served(TenantId(tenant)) for tenant in sizes]
        assert max(counters) - min(counters) <= LARGEST_TURN


@given(shapes, small_data, st.integers(0, 10))
@settings(max_examples=50)
def test_what_is_served_to_others_before_a_request_ends_is_bounded(floods, request, before):
    """By its fair share: nobody else gets more of it than it costs, but for a turn; and by what
    is left of the tick it ends in."""
    crowd = Endless(floods)
    for _ in range(before):
        crowd.tick()
    small = job(0, lengths=request, run="small-0")
    crowd.server.submit(small)
    others = 0
    while len(crowd.server.queues["small-0"]):
        others += sum(one.tokens for one in crowd.tick().slices if one.job != small)

    cost = small.whole.cost
    assert others <= len(floods) * (cost + LARGEST_TURN) + BUDGET


@given(
    flood=st.lists(data, min_size=30, max_size=60),
    before=st.integers(0, 10),
    runs=st.integers(1, 5),
)
def test_a_flood_delays_a_small_request_by_one_tick_at_most(flood, before, runs):
    crowd: dict[str, list[Job]] = {f"flood-{n}": [] for n in range(runs)}
    for number, lengths in enumerate(flood):
        own = crowd[f"flood-{number % runs}"]
        own.append(job(len(own), lengths=lengths, run=f"flood-{number % runs}"))
    server = Server(crowd)
    for _ in range(before):
        server.tick()
    small = job(0, lengths=(4,), run="small-0")
    server.submit(small)

    ticks = [server.tick(), server.tick()]
    assert any(small in tick.jobs for tick in ticks if tick)


@given(st.lists(st.integers(1, 5), min_size=1, max_size=50), st.integers(0, 5))
def test_beside_a_flood_of_small_datums_a_small_request_is_in_the_next_tick(sizes, before):
    flood = [job(seq, lengths=(size,) * 40, run="flood-0") for seq, size in enumerate(sizes)]
    server = Server({"flood-0": flood})
    for _ in range(before):
        server.tick()
    small = job(0, lengths=(10,), run="small-0")
    server.submit(small)

    tick = server.tick()
    assert tick is not None
    assert small in tick.jobs


def test_within_a_tenant_the_least_served_run_goes_first():
    crowd = {run: [job(0, run=run)] for run in ("a-0", "a-1")}
    served = nobody()
    served.runs.charge(TenantId("a"), RunId("a-0"), 1)
    tick = next_tick(ready(crowd), served, token_budget=10)
    assert tick is not None
    assert tick.jobs[0].run == "a-1"


def test_a_tenant_with_many_runs_gets_no_more_than_one_with_a_single_run():
    crowd = {
        run: [job(seq, run=run) for seq in range(50)]
        for run in ("one-0", *(f"many-{n}" for n in range(9)))
    }
    server, tokens = Server(crowd, budget=20), defaultdict(int)
    for _ in range(20):
        tick = server.tick()
        assert tick is not None
        for one in tick.slices:
            tokens[one.job.tenant] += one.tokens

    assert tokens["one"] == tokens["many"]


def test_a_new_run_is_level_with_its_tenants_runs_whoever_else_has_more():
    """Another tenant with many runs has had each of them served little."""
    crowd = {"a-0": [job(seq, lengths=(16,), run="a-0") for seq in range(500)]}
    crowd |= {
        f"b-{n}": [job(seq, lengths=(16,), run=f"b-{n}") for seq in range(200)] for n in range(10)
    }
    server = Server(crowd)
    for _ in range(100):
        server.tick()
    for seq in range(500):
        server.submit(job(seq, lengths=(16,), run="a-1"))
    tokens: defaultdict[str, int] = defaultdict(int)
    for _ in range(100):
        tick = server.tick()
        assert tick is not None
        for one in tick.slices:
            tokens[one.job.run] += one.tokens

    assert abs(tokens["a-0"] - tokens["a-1"]) <= 2 * 16


def test_ten_thousand_runs_cost_a_tick_no_more_than_a_look_at_each():
    """Beside that, a tick costs its turns: counted in what is asked of the counters."""
    crowd = {
        f"{n % 100}-{n}": [job(0, lengths=(10,) * 3, run=f"{n % 100}-{n}")] for n in range(10_000)
    }
    served, asked = nobody(), itertools.count()
    for counters in (served.tenants, served.runs):
        look = counters.served
        counters.served = lambda *key, look=look: (next(asked), look(*key))[1]  # type: ignore[method-assign]
    next_tick(ready(crowd), served, token_budget=1000)
    assert next(asked) <= 4 * len(crowd)
