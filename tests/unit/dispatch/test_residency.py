"""More runs than memory: the idle ones go to disk and come back, and their clients see nothing."""

from __future__ import annotations

import asyncio
import gc
from pathlib import Path

import pytest

from server.core.ids import RunId
from server.core.recent import Recent
from server.core.requests import State
from server.store.database import Database
from tests.databases import Clock
from tests.fake_backend import RUN_BYTES, FakeBackend
from tests.unit.dispatch.workplace import ME, Workplace

TRAINED = 3 * RUN_BYTES
"""Bytes that a run counts for: weights, moments and the gradient that comes and goes."""


def room_for(runs: int, db: Database, data: Path) -> Workplace:
    return Workplace(db, data, FakeBackend(), Clock(), run_memory_bytes=runs * TRAINED)


async def step(place: Workplace, run: RunId, seq: int) -> None:
    requests = [await place.compute(run, seq, [seq, 3]), await place.optim_step(run, seq + 1)]
    await place.work()
    for request in requests:
        assert (await place.outcome(request)).state is State.DONE


def by_hand(steps: int) -> tuple[float, float, int]:
    weight, moment = 1.0, 0.0
    for number in range(steps):
        moment = 0.5 * moment + (2 * number + 1) + 3
        weight = 0.9 * weight + 0.01 * moment
    return weight, moment, steps


async def check(place: Workplace, run: RunId, steps: int) -> None:
    await place.compute(run, 2 * steps + 1, [1], backward=False)
    await place.work()
    state = place.state(run)
    assert (state.weight, state.moment, state.steps) == pytest.approx(by_hand(steps))


@pytest.mark.parametrize("deaths", [False, True])
async def test_fifty_runs_in_memory_for_ten_all_train_as_if_alone(
    db: Database, data: Path, deaths: bool
):
    place = room_for(10, db, data)
    runs = [await place.create() for _ in range(50)]
    for number in range(3):
        for index, run in enumerate(runs):
            if deaths and index % 20 == 7:
                place.backend.kill()
            if deaths and index % 20 == 15:
                place.backend.die_in = {"save": 0}
            await step(place, run, 2 * number + 1)
            report = await place.backend.memory()
            assert sum(use.total for use in report.runs.values()) <= 10 * TRAINED
    assert place.backend.most_runs <= 21, "those that were never trained are half as large"
    for run in runs:
        await check(place, run, 3)


async def test_the_runs_that_were_used_last_stay(db: Database, data: Path):
    place = room_for(2, db, data)
    first, second = await place.create(), await place.create()
    await step(place, first, 1)
    await step(place, second, 1)
    await step(place, first, 3)
    third = await place.create()
    await step(place, third, 1)
    assert place.backend.runs.keys() == {first, third}


async def test_a_run_that_work_waits_for_stays(db: Database, data: Path):
    """Above the budget, if it must be."""
    place = room_for(1, db, data)
    runs = [await place.create() for _ in range(3)]
    for run in runs:
        await place.compute(run, 1, [1])
        await place.optim_step(run, 3)  # a number is missing, so it waits
    await place.round()
    while await place.moved():
        pass
    await place.round()
    assert place.backend.runs.keys() >= set(runs)
    place.clock.now += 5
    await place.work()
    assert len(place.backend.runs) == 1


async def test_those_that_had_to_stay_go_once_nothing_waits_for_them(db: Database, data: Path):
    place = room_for(2, db, data)
    runs = [await place.create() for _ in range(5)]
    for seq in (1, 3):
        for run in runs:
            await place.compute(run, seq, [seq, 3])
            await place.optim_step(run, seq + 1)
    await place.work()
    assert len(place.backend.runs) <= 2


async def test_a_gradient_that_waits_for_a_step_comes_back_too(db: Database, data: Path):
    place = room_for(1, db, data)
    run, other = await place.create(), await place.create()
    await place.compute(run, 1, [7])
    await place.work()
    await step(place, other, 1)
    assert run not in place.backend.runs
    await place.optim_step(run, 2)
    await place.work()
    assert place.state(run).moment == 7


async def test_a_run_that_cannot_be_saved_stays(db: Database, data: Path):
    """Without a snapshot, all it ever did would have to be done again."""
    place = room_for(1, db, data)
    run, other = await place.create(), await place.create()
    await step(place, run, 1)
    save = place.backend.save

    async def fail(*_: object) -> int:
        raise OSError("the disk is full")

    place.backend.save = fail  # type: ignore[method-assign]
    await step(place, other, 1)
    assert place.backend.runs.keys() == {run, other}
    place.backend.save = save  # type: ignore[method-assign]
    third = await place.create()
    assert place.backend.runs.keys() == {third}


async def test_a_run_that_is_asked_for_while_it_goes_comes_back(db: Database, data: Path):
    place = room_for(1, db, data)
    run, other = await place.create(), await place.create()
    await step(place, run, 1)
    saving, go_on = asyncio.Event(), asyncio.Event()
    save = place.backend.save

    async def slowly(*arguments: str) -> int:
        saving.set()
        await go_on.wait()
        return await save(*arguments)  # type: ignore[arg-type]

    place.backend.save = slowly  # type: ignore[method-assign,assignment]
    stepping = asyncio.create_task(step(place, other, 1))
    await saving.wait()
    place.backend.save = save  # type: ignore[method-assign]
    request = await place.compute(run, 3, [3, 3])
    go_on.set()
    await stepping
    await place.work()
    assert (await place.outcome(request)).state is State.DONE
    await place.optim_step(run, 4)
    await place.work()
    assert place.state(run).steps == 2


async def test_what_a_failed_call_left_in_memory_is_unloaded(place: Workplace):
    run, other = await place.create(), await place.create()
    place.live(run).resident_in = None
    await step(place, other, 1)
    assert place.backend.runs.keys() == {other}


async def test_what_waits_for_its_run_says_so(place: Workplace):
    run = await place.create()
    place.backend.kill()
    place.backend.hold()
    request = await place.compute(run, 1, [1])
    assert place.dispatcher.choose() is None
    assert place.runs.registry.held_up(run) == "restoring"
    place.backend.let_go()
    await place.work()
    assert place.runs.registry.held_up(run) is None
    assert (await place.outcome(request)).state is State.DONE


async def test_runs_that_were_used_long_ago_are_forgotten_and_known_again(place: Workplace):
    place.runs.registry._recent = Recent(2)
    runs = [await place.create() for _ in range(4)]
    for run in runs:
        await place.compute(run, 2, [5])  # behind a number that never comes
        place.clock.now += 5
        await place.work()
    place.dispatcher.release(runs)
    await place.work()
    await place.db.write(lambda _: asyncio.sleep(0))  # the writer holds what it wrote last
    gc.collect()
    assert len(place.runs.registry._runs) == 2

    late = await place.compute(runs[0], 1, [7])
    after = await place.optim_step(runs[0], 3)
    await place.work()
    for request in (late, after):
        found = await place.ledger.retrieve(request.id, ME.id, 0)
        assert found.state is State.DONE
    assert place.state(runs[0]).moment == 12
