"""Several trainer groups of one base model: where runs go, and that a move changes nothing."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncGenerator, Callable
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from server.core.errors import BadInput, NotFound, Unavailable
from server.core.ids import RunId
from server.core.placement import LATELY_S
from server.core.records import Request
from server.core.requests import State
from server.dispatch import pool as pooling
from server.store.database import Database
from tests.databases import Clock
from tests.fake_backend import DEADLY_TOKEN, FakeBackend
from tests.unit.dispatch.workplace import OTHER, Workplace

BUDGET = 20


@pytest_asyncio.fixture
async def place(
    db: Database, data: Path, monkeypatch: pytest.MonkeyPatch
) -> AsyncGenerator[Workplace]:
    """Two groups that are working."""
    monkeypatch.setattr(pooling, "TEND_S", 0.01)
    place = Workplace(db, data, FakeBackend(), Clock(), more=[FakeBackend()], token_budget=BUDGET)
    async with place.running():
        yield place


def home(place: Workplace, run: RunId) -> str | None:
    return place.live(run).trainer


def names(place: Workplace) -> list[str]:
    return [one.name for one in place.pool.trainers]


def states(place: Workplace) -> list[str]:
    return [one.state for one in place.trainers.statuses()]


def backend_of(place: Workplace, run: RunId) -> FakeBackend:
    return next(one.backend for one in place.pool.trainers if one.name == home(place, run))  # type: ignore[return-value]


def gone_for_good(backend: FakeBackend) -> None:
    """Dead, and never up again."""
    backend.describe = asyncio.Event().wait  # type: ignore[method-assign,assignment]
    backend.kill()


def datums(count: int, token: int = 1) -> list[list[int]]:
    """Five tokens each, so that four fill a tick."""
    return [[token] * 5 for _ in range(count)]


async def until(true: Callable[[], bool]) -> None:
    async with asyncio.timeout(10):
        while not true():  # noqa: ASYNC110 - what it waits for has no event
            await asyncio.sleep(0.005)


async def steps(place: Workplace, run: RunId, first: int, count: int) -> list[Request]:
    """Passes on 3 and the number itself, each with its step; what was asked for."""
    asked = []
    for seq in range(first, first + 2 * count, 2):
        asked += [await place.compute(run, seq, [seq, 3]), await place.optim_step(run, seq + 1)]
    return asked


def by_hand(count: int) -> tuple[float, float, int]:
    """What `steps` from 1 on lead to."""
    weight, moment = 1.0, 0.0
    for number in range(count):
        moment = 0.5 * moment + (2 * number + 1) + 3
        weight = 0.9 * weight + 0.01 * moment
    return weight, moment, count


async def check(place: Workplace, run: RunId, count: int) -> None:
    await place.finished(await place.compute(run, 2 * count + 1, [1], backward=False))
    state = place.state(run)
    assert (state.weight, state.moment, state.steps) == pytest.approx(by_hand(count))


async def test_new_runs_are_shared_out(place: Workplace):
    runs = [await place.create() for _ in range(6)]
    assert sorted(home(place, run) or "" for run in runs) == sorted(names(place) * 3)
    assert [len(backend.runs) for backend in place.backends] == [3, 3]


async def test_groups_work_at_the_same_time(place: Workplace):
    runs = [await place.create() for _ in range(2)]
    place.backends[0].hold()
    slow, quick = [(await steps(place, run, 1, 2)) for run in runs]
    assert [one.state for one in await place.finished(*quick)] == [State.DONE] * 4
    place.backends[0].let_go()
    await place.finished(*slow)
    for run in runs:
        await check(place, run, 2)


async def test_a_run_that_moves_between_its_steps_is_the_one_that_it_was(place: Workplace):
    run = await place.create()
    for number in range(3):
        await place.finished(*await steps(place, run, 4 * number + 1, 1))
        asked = await steps(place, run, 4 * number + 3, 1)
        before = home(place, run)
        await place.trainers.move(run, None)
        await place.finished(*asked)
        await until(lambda before=before: home(place, run) not in {before, None})
    await check(place, run, 6)
    assert [status.arrivals for status in place.trainers.statuses()] == [1, 2]


async def test_a_gradient_that_waits_for_its_step_moves_too(place: Workplace):
    run = await place.create()
    await place.finished(await place.compute(run, 1, [7]))
    await place.trainers.move(run, "trainer-1")
    await place.finished(await place.optim_step(run, 2))
    assert home(place, run) == "trainer-1"
    assert place.state(run).moment == 7


async def test_a_request_that_has_begun_is_finished_before_its_run_goes(place: Workplace):
    """Although others have turns in between."""
    run, _, other = [await place.create() for _ in range(3)]
    place.backend.pass_seconds = 0.01
    step = place.backend.optim_step

    async def slowly(steps: Any) -> Any:
        await asyncio.sleep(0.01)
        return await step(steps)

    place.backend.optim_step = slowly  # type: ignore[method-assign]
    between = [await place.optim_step(other, seq) for seq in range(1, 10)]
    asked = [await place.compute(run, 1, *datums(40)), await place.compute(run, 2, *datums(4))]
    await until(lambda: len(place.backend.passes) > 2)
    await place.trainers.move(run, "trainer-1")
    assert place.runs.registry.held_up(run) is None, "it goes on"
    await until(lambda: place.runs.registry.held_up(run) is not None)
    assert place.runs.registry.held_up(run) == "moving to another trainer"
    await place.finished(*asked, *between)
    assert [sum(one.pass_tokens) for one in place.backends] == [200, 20]
    assert place.state(run).gradient == 220


async def test_in_maintenance_a_run_goes_at_once_and_its_request_begins_again(place: Workplace):
    run = await place.create()
    place.backend.pass_seconds = 0.01
    asked = await place.compute(run, 1, *datums(40))
    await until(lambda: len(place.backend.passes) > 2)
    place.trainers.hold(True)
    await place.trainers.move(run, "trainer-1")
    await until(lambda: home(place, run) == "trainer-1")
    assert run not in place.backend.runs
    place.trainers.hold(False)
    await place.finished(asked)
    assert sum(place.backends[1].pass_tokens) == 200
    assert place.state(run).gradient == 200


async def test_a_run_that_cannot_be_saved_moves_by_its_journal(place: Workplace):
    run = await place.create()
    await place.finished(*await steps(place, run, 1, 3))

    async def fail(*_: object) -> int:
        raise OSError("the disk is full")

    place.backend.save = fail  # type: ignore[method-assign]
    await place.trainers.move(run, "trainer-1")
    await check(place, run, 3)
    assert home(place, run) == "trainer-1"


async def test_what_waits_for_a_group_that_died_goes_to_another_at_once(place: Workplace):
    runs = [await place.create() for _ in range(4)]
    mine = [run for run in runs if home(place, run) == "trainer-0"]
    for run in runs:
        await place.finished(*await steps(place, run, 1, 2))
    place.backend.hold()
    asked = [one for run in runs for one in await steps(place, run, 5, 2)]
    gone_for_good(place.backend)
    later = [one for run in mine for one in await steps(place, run, 9, 1)]
    place.backend.let_go()
    await until(lambda: all(home(place, run) == "trainer-1" for run in mine))
    assert {one.state for one in await place.finished(*asked, *later)} == {State.DONE}
    for run in runs:
        assert home(place, run) == "trainer-1"
        await check(place, run, 5 if run in mine else 4)
    assert states(place) == ["lost", "ready"]


async def test_an_idle_run_of_a_group_that_died_goes_elsewhere_when_it_is_asked_for(
    place: Workplace,
):
    run = await place.create()
    await place.finished(*await steps(place, run, 1, 2))
    gone_for_good(place.backend)
    await check(place, run, 2)
    assert home(place, run) == "trainer-1"


async def test_a_group_that_died_is_started_again_although_nobody_asks_for_it(place: Workplace):
    place.backend.kill()
    await until(lambda: states(place) == ["ready", "ready"])
    assert place.backend.generation == 2


async def test_with_every_group_dead_runs_wait_for_the_first_that_comes_back(place: Workplace):
    runs = [await place.create() for _ in range(6)]
    for run in runs:
        await place.finished(*await steps(place, run, 1, 1))
    describe = place.backends[1].describe
    back = asyncio.Event()

    async def later() -> Any:
        await back.wait()
        return await describe()

    for backend in place.backends:
        gone_for_good(backend)
    place.backends[1].describe = later  # type: ignore[method-assign]
    asked = [one for run in runs for one in await steps(place, run, 3, 1)]
    await asyncio.sleep(0.05)
    assert {place.runs.registry.held_up(run) for run in runs} == {"restoring"}
    back.set()
    assert {one.state for one in await place.finished(*asked)} == {State.DONE}
    for run in runs:
        assert home(place, run) == "trainer-1"
        await check(place, run, 2)


async def test_a_run_is_restored_elsewhere_only_from_what_is_on_disk(place: Workplace):
    """Its first step has run and is not committed when its group dies in what comes next."""
    run = await place.create()
    place.backend.hold()
    asked = await steps(place, run, 1, 2)
    entered, go_on = asyncio.Event(), asyncio.Event()

    async def hold_the_writer(_: Any) -> None:
        entered.set()
        await go_on.wait()

    holding = asyncio.create_task(place.db.write(hold_the_writer))
    await entered.wait()
    place.backend.die_in["forward_backward"] = 1
    place.backend.describe = asyncio.Event().wait  # type: ignore[method-assign,assignment]
    place.backend.let_go()
    await until(lambda: home(place, run) == "trainer-1")
    assert len(place.backend.steps) == 1
    await asyncio.sleep(0.05)
    go_on.set()
    await holding
    await place.finished(*asked)
    await check(place, run, 2)


async def test_after_a_restart_runs_are_placed_anew(db: Database, data: Path):
    place = Workplace(db, data, FakeBackend(), Clock(), more=[FakeBackend()])
    async with place.running():
        runs = [await place.create() for _ in range(2)]
        for run in runs:
            await place.finished(*await steps(place, run, 1, 2))
        for run in runs:
            await place.trainers.move(run, "trainer-1")
    for run in runs:
        await steps(place, run, 5, 1)
    later = await place.restarted()
    async with later.running():
        assert sorted(home(later, run) or "" for run in runs) == names(later)
        for run in runs:
            await check(later, run, 3)


async def test_a_request_that_groups_die_of_fails_alone_whichever_they_are(place: Workplace):
    runs = [await place.create() for _ in range(4)]
    deadly = await place.compute(runs[0], 1, [DEADLY_TOKEN])
    asked = [one for run in runs[1:] for one in await steps(place, run, 1, 2)]
    [outcome] = await place.finished(deadly)
    assert outcome.error_category == "server"
    assert {one.state for one in await place.finished(*asked)} == {State.DONE}
    assert sum(one.generation - 1 for one in place.backends) == 2
    for run in runs[1:]:
        await check(place, run, 2)


async def test_a_drained_group_is_left_by_its_runs_and_takes_none_until_it_is_resumed(
    place: Workplace,
):
    runs = [await place.create() for _ in range(4)]
    asked = [one for run in runs for one in await steps(place, run, 1, 3)]
    place.trainers.drain("trainer-0")
    more = await place.create()
    assert {one.state for one in await place.finished(*asked)} == {State.DONE}
    await until(lambda: states(place) == ["drained", "ready"])
    assert place.backend.runs == {}
    for run in runs:
        await check(place, run, 3)
        assert home(place, run) == "trainer-1"
    assert home(place, more) == "trainer-1"
    place.trainers.resume("trainer-0")
    assert states(place) == ["ready", "ready"]
    assert home(place, await place.create()) == "trainer-0"


async def test_with_every_group_drained_what_comes_waits_and_is_told_so(place: Workplace):
    run = await place.create()
    for name in names(place):
        place.trainers.drain(name)
    await until(lambda: states(place) == ["drained", "drained"])
    asked = await steps(place, run, 1, 2)
    assert place.runs.registry.held_up(run) == "every trainer is drained"
    assert [one.passes for one in place.backends] == [[], []]
    place.trainers.resume("trainer-1")
    assert {one.state for one in await place.finished(*asked)} == {State.DONE}
    await check(place, run, 2)


async def test_a_group_that_dies_while_it_is_drained_keeps_nobody(place: Workplace):
    run = await place.create()
    await place.finished(*await steps(place, run, 1, 2))
    place.backend.die_in["save"] = 0
    place.backend.describe = asyncio.Event().wait  # type: ignore[method-assign,assignment]
    place.trainers.drain("trainer-0")
    await until(lambda: home(place, run) != "trainer-0")
    await check(place, run, 2)


async def test_a_run_moves_to_an_idle_group_once_that_was_idle_for_a_while(place: Workplace):
    place.trainers.drain("trainer-1")
    runs = [await place.create(), await place.create(OTHER)]
    place.backend.hold()
    asked = await steps(place, runs[0], 1, 2)
    asked.append(await place.compute(runs[1], 1, [5], tenant=OTHER))
    place.trainers.resume("trainer-1")
    await asyncio.sleep(0.05)
    assert {home(place, run) for run in runs} == {"trainer-0"}, "it may be over soon"
    place.clock.now += pooling.LOPSIDED_S
    place.backend.let_go()
    place.backend.pass_seconds = 0.05
    await until(lambda: "trainer-1" in {home(place, run) for run in runs})
    await place.finished(*asked)
    await check(place, runs[0], 2)


async def test_runs_that_were_silent_for_long_do_not_count_as_load(place: Workplace):
    first = [await place.create() for _ in range(4)]
    place.trainers.drain("trainer-1")
    await until(lambda: states(place)[1] == "drained")
    place.clock.now += LATELY_S
    place.trainers.resume("trainer-1")
    assert {home(place, run) for run in first} <= {"trainer-0", None}
    fresh = [await place.create() for _ in range(2)]
    assert sorted(home(place, run) or "" for run in fresh) == names(place)


async def test_what_operators_ask_for_in_vain_is_refused_in_words(place: Workplace):
    run = await place.create()
    with pytest.raises(NotFound, match="there are: trainer-0, trainer-1"):
        place.trainers.drain("trainer-9")
    with pytest.raises(NotFound, match="model_id 'nobody' does not exist"):
        await place.trainers.move(RunId("nobody"), None)
    place.backend.hold()
    asked = await place.compute(run, 1, [1])
    await place.trainers.move(run, None)
    with pytest.raises(Unavailable, match="is moving already"):
        await place.trainers.move(run, "trainer-1")
    place.backend.let_go()
    await place.finished(asked)
    await until(lambda: home(place, run) == "trainer-1")
    await place.trainers.move(run, "trainer-0")
    await until(lambda: home(place, run) == "trainer-0")
    place.trainers.drain("trainer-1")
    with pytest.raises(Unavailable, match="trainer-1 takes no runs: it is drain"):
        await place.trainers.move(run, "trainer-1")
    with pytest.raises(Unavailable, match="no other trainer of tiny/fake takes runs"):
        await place.trainers.move(run, None)


async def test_a_run_of_another_base_model_is_not_taken(db: Database, data: Path):
    place = Workplace(db, data, FakeBackend(), Clock())
    run = await place.create()
    stranger = pooling.Pool("other/model", place.runs.registry, place.clock)
    trainer = place.pool.trainers[0]
    stranger.add(
        pooling.Trainer(name="trainer-7", backend=FakeBackend(), dispatcher=trainer.dispatcher)
    )
    place.trainers._pools["other/model"] = stranger
    with pytest.raises(BadInput, match="trainer-7 trains other/model; the run is of tiny/fake"):
        await place.trainers.move(run, "trainer-7")


@pytest.mark.parametrize("seed", range(6))
async def test_moves_deaths_and_drains_at_any_moment_change_no_result(place: Workplace, seed: int):
    """As long as no request is hit twice by a death."""
    chance = random.Random(seed)
    runs = [await place.create() for _ in range(5)]
    expected = dict.fromkeys(runs, (1.0, 0.0, 0.0))
    for backend in place.backends:
        backend.pass_seconds = 0.002
    for seq in range(1, 16):
        asked = []
        for run in runs:
            weight, moment, gradient = expected[run]
            if chance.random() < 0.7:
                sizes = [chance.randrange(1, 30) for _ in range(chance.randrange(1, 12))]
                asked.append(await place.compute(run, seq, *([1] * size for size in sizes)))
                expected[run] = weight, moment, gradient + sum(sizes)
            else:
                asked.append(await place.optim_step(run, seq))
                moment = 0.5 * moment + gradient
                expected[run] = 0.9 * weight + 0.01 * moment, moment, 0.0
        await asyncio.sleep(chance.random() * 0.02)
        await disturb(place, chance, runs)
        if seq % 3 == 0:
            assert {one.state for one in await place.finished(*asked)} == {State.DONE}
    for name in names(place):
        place.trainers.resume(name)
    for run in runs:
        await place.finished(await place.compute(run, 16, [1], backward=False))
    await until(lambda: not place.pool._moves)
    found: dict[RunId, Any] = {}
    for run in runs:
        await place.finished(await place.compute(run, 17, [1], backward=False))
        state = place.state(run)
        found[run] = pytest.approx((state.weight, state.moment, state.gradient))
    assert expected == found


async def disturb(place: Workplace, chance: random.Random, runs: list[RunId]) -> None:
    what = chance.choice(["move", "move", "kill", "drain", "resume"])
    name = chance.choice(names(place))
    try:
        if what == "move":
            await place.trainers.move(chance.choice(runs), chance.choice([name, None]))
        elif what == "drain" and states(place).count("ready") == 2:
            place.trainers.drain(name)
        elif what == "resume":
            place.trainers.resume(name)
        elif what == "kill":
            chance.choice(place.backends).kill()
    except Unavailable:
        pass
