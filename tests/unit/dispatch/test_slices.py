"""Large requests in slices: what their clients get is what they would get whole, and nobody waits
for another's."""

from __future__ import annotations

import asyncio
import itertools
import random
from pathlib import Path
from typing import Any

import pytest

from server.core.ids import TenantId
from server.core.records import Tenant
from server.core.requests import State
from server.store.database import Database
from tests.databases import Clock
from tests.fake_backend import DEADLY_TOKEN, REFUSED_TOKEN, FakeBackend
from tests.unit.dispatch.workplace import ME, OTHER, Workplace

BUDGET = 20


@pytest.fixture
def place(db: Database, data: Path) -> Workplace:
    return Workplace(db, data, FakeBackend(), Clock(), token_budget=BUDGET)


def datums(count: int, token: int = 1, length: int = 5) -> list[list[int]]:
    return [[token] * length] * count


async def test_a_request_above_the_budget_is_computed_over_several_ticks(
    place: Workplace, db: Database, data: Path
):
    roomy = Workplace(db, data, FakeBackend(), Clock(), token_budget=1000)
    results = []
    for where, sizes in ((place, [20, 20, 15]), (roomy, [55])):
        run = await where.create()
        request = await where.compute(run, 1, *datums(11))
        assert [tick.tokens for tick in await where.work()] == sizes
        assert where.state(run).gradient == 55
        results.append((await where.outcome(request)).result)
    assert results[0] == results[1] is not None


async def test_a_datum_above_the_budget_goes_alone(place: Workplace):
    run = await place.create()
    request = await place.compute(run, 1, [1] * 5, [1] * 50, [1] * 5)
    assert [tick.tokens for tick in await place.work()] == [5, 50, 5]
    assert (await place.outcome(request)).state is State.DONE


async def test_a_small_request_does_not_wait_for_the_large_one_of_another(place: Workplace):
    large, small = await place.create(), await place.create(OTHER)
    first = await place.compute(large, 1, *datums(100))
    await place.round()
    second = await place.compute(small, 1, [1], tenant=OTHER)
    await place.round()

    assert (await place.outcome(second)).state is State.DONE
    assert (await place.outcome(first)).state is State.WAITING


async def test_beside_a_flood_a_small_request_is_in_the_next_tick(db: Database, data: Path):
    place = Workplace(db, data, FakeBackend(), Clock(), token_budget=1024)
    flood, small = await place.create(), await place.create(OTHER)
    for seq in range(1, 201):
        await place.compute(flood, seq, *datums(8, length=64))
    for _ in range(3):
        await place.round()
    request = await place.compute(small, 1, [1] * 64, tenant=OTHER)
    tick = await place.round()

    assert tick is not None
    assert request.id in {job.request for job in tick.jobs}
    assert tick.tokens == 1024
    assert (await place.outcome(request)).state is State.DONE


async def test_tenants_are_served_by_their_weights(db: Database, data: Path):
    weights = {OTHER.id: 3.0}
    place = Workplace(db, data, FakeBackend(), Clock(), token_budget=BUDGET, tenant_weights=weights)
    runs = {ME.id: await place.create(), OTHER.id: await place.create(OTHER)}
    for seq in range(1, 5):
        for tenant in (ME, OTHER):
            await place.compute(runs[tenant.id], seq, *datums(64), tenant=tenant)
    served = dict.fromkeys(runs, 0)
    for _ in range(30):
        tick = await place.round()
        for one in tick.slices if tick else ():
            served[one.job.tenant] += one.tokens
    assert sum(served.values()) == 30 * BUDGET
    assert served[OTHER.id] / served[ME.id] == pytest.approx(3, rel=0.2)


async def test_a_part_that_fails_ends_its_request_alone(place: Workplace):
    runs = [await place.create() for _ in range(2)]
    bad = await place.compute(runs[0], 1, *datums(4), [REFUSED_TOKEN], *datums(20))
    after = await place.compute(runs[0], 2, *datums(2))
    good = await place.compute(runs[1], 1, *datums(8))
    await place.work()

    assert (await place.outcome(bad)).error_category == "user"
    assert [(await place.outcome(one)).state for one in (after, good)] == [State.DONE] * 2
    assert [place.state(run).gradient for run in runs] == [10, 40]
    assert sum(place.backend.pass_tokens) < 4 * 5 + 1 + 20 * 5, "the rest was not sent"


async def test_a_request_is_taken_up_once(place: Workplace):
    run = await place.create()
    request = await place.compute(run, 1, *datums(12))
    began = place.clock.now
    for _ in range(3):
        await place.round()
        place.clock.now += 10
    assert (await place.outcome(request)).started_at == began


async def test_what_ran_of_it_before_the_worker_died_runs_again(place: Workplace):
    """Of the request that was in the pass, and of one that had begun before."""
    runs = [await place.create(), await place.create(OTHER)]
    requests = [
        await place.compute(run, 1, *datums(12, token), tenant=tenant)
        for token, (run, tenant) in enumerate(zip(runs, (ME, OTHER), strict=True), 1)
    ]
    tick = await place.round()
    assert tick is not None
    assert {one.more for one in tick.slices} == {True}
    place.backend.die_in["forward_backward"] = 1
    await place.work()

    assert [(await place.outcome(one)).state for one in requests] == [State.DONE] * 2
    assert [place.state(run).gradient for run in runs] == [60, 120]


async def test_a_datum_in_the_middle_that_kills_the_backend_fails_its_request_alone(
    place: Workplace,
):
    runs = [await place.create() for _ in range(3)]
    requests = [
        await place.compute(runs[0], 1, *datums(9)),
        await place.compute(runs[1], 1, *datums(6), [DEADLY_TOKEN], *datums(6)),
        await place.compute(runs[2], 1, *datums(9)),
    ]
    await place.work()
    outcomes = [await place.outcome(request) for request in requests]
    assert [one.state for one in outcomes] == [State.DONE, State.FAILED, State.DONE]
    assert outcomes[1].error_category == "server"
    for run in (runs[0], runs[2]):
        await place.compute(run, 2, [1], backward=False)
    await place.work()
    assert [place.state(run).gradient for run in (runs[0], runs[2])] == [45, 45]
    assert place.backend.generation == 3, "once with others, once alone"


async def test_what_is_replayed_keeps_the_budget_too(place: Workplace):
    run = await place.create()
    await place.compute(run, 1, *datums(11))
    await place.optim_step(run, 2)
    await place.work()
    before = place.state(run)
    place.backend.kill()
    place.backend.pass_tokens.clear()
    await place.compute(run, 3, [1], backward=False)
    await place.work()
    assert place.backend.pass_tokens == [20, 20, 15, 1]
    assert place.state(run) == before


async def test_restores_do_not_hold_up_those_who_are_there(place: Workplace):
    """They make one call of the budget's size between two ticks, however many they are."""
    away, short = [await place.create(), await place.create()], await place.create(OTHER)
    for run in away:
        await place.compute(run, 1, *datums(100))
    await place.work()
    for run in away:
        place.live(run).resident_in = None
    place.backend.passes.clear()
    place.backend.pass_tokens.clear()
    waiting = [await place.compute(run, 2, [1]) for run in away]
    here = [await place.compute(short, seq, *datums(4), tenant=OTHER) for seq in range(1, 11)]
    place.backend.pass_seconds = 0.005
    looping = asyncio.create_task(place.dispatcher.run())
    for request in here:
        assert (await place.ledger.retrieve(request.id, OTHER.id, 5)).state is State.DONE
    assert all(place.runs.registry.held_up(run) == "restoring" for run in away)
    for request in waiting:
        assert (await place.ledger.retrieve(request.id, ME.id, 5)).state is State.DONE
    place.dispatcher.stop()
    await looping

    assert max(place.backend.pass_tokens) == BUDGET
    ticks = [n for n, runs in enumerate(place.backend.passes) if runs == [short]]
    assert len(ticks) == 10
    assert max(later - before for before, later in itertools.pairwise(ticks)) <= 2
    assert [place.state(run).gradient for run in away] == [501, 501]


@pytest.mark.parametrize("seed", range(6))
async def test_deaths_at_any_moment_change_no_result(place: Workplace, seed: int):
    """As long as no request is hit twice: three tenants with large and small requests."""
    chance = random.Random(seed)
    tenants = [ME, OTHER, Tenant(id=TenantId("third"))]
    runs = [await place.create(tenant) for tenant in tenants]
    expected = dict.fromkeys(runs, (1.0, 0.0, 0.0))
    for seq in range(1, 13):
        for run, tenant in zip(runs, tenants, strict=True):
            weight, moment, gradient = expected[run]
            if chance.random() < 0.7:
                sizes = [chance.randrange(1, 30) for _ in range(chance.randrange(1, 12))]
                await place.compute(run, seq, *([1] * size for size in sizes), tenant=tenant)
                expected[run] = weight, moment, gradient + sum(sizes)
            else:
                await place.optim_step(run, seq, tenant)
                moment = 0.5 * moment + gradient
                expected[run] = 0.9 * weight + 0.01 * moment, moment, 0.0
        if seq % 3:
            continue  # let several of each wait
        calls = ["forward_backward", "optim_step", "create", "load", "save", "memory", "unload"]
        place.backend.die_in = {chance.choice(calls): chance.randrange(4)}
        for run in runs:
            place.live(run).unsaved_s += chance.choice([0.0, 1e10])
        await place.work()
        place.backend.die_in = {}

    for run, tenant in zip(runs, tenants, strict=True):
        await place.compute(run, 13, [1], tenant=tenant, backward=False)
    await place.work()
    found: dict[Any, Any] = {}
    for run in runs:
        state = place.state(run)
        found[run] = pytest.approx((state.weight, state.moment, state.gradient))
    assert expected == found
