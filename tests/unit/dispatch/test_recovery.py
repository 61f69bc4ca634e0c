"""After a crash at any moment every run is where its acknowledged requests had brought it."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from server.core.errors import BadInput
from server.core.paths import parse_path
from server.core.requests import State
from server.runs import wire
from server.store.database import Database, sqlite_url
from server.tenancy.sessions import CreateSession
from server.wire.json_shapes import parse_json
from tests import bodies
from tests.databases import Clock
from tests.fake_backend import REFUSED_TOKEN, FakeBackend, FakeRun
from tests.unit.dispatch.workplace import ME, Workplace, settled


async def train(place: Workplace, run: Any, first: int, steps: int) -> int:
    """Some steps; the next free number."""
    seq = first
    for _ in range(steps):
        await place.compute(run, seq, [seq, 2 * seq])
        await place.optim_step(run, seq + 1)
        seq += 2
    await place.work()
    return seq


def values(state: FakeRun) -> tuple[float, float, float, int]:
    return state.weight, state.moment, state.gradient, state.steps


async def test_a_restart_repeats_what_no_snapshot_includes_in_order(place: Workplace):
    run = await place.create()
    seq = await train(place, run, 1, steps=3)
    await place.compute(run, seq, [50])
    await place.work()
    before = values(place.state(run))

    later = await place.restarted()
    request = await later.compute(run, seq + 1, [1], backward=False)
    await later.work()
    assert values(later.state(run)) == before
    assert (await later.outcome(request)).state is State.DONE


async def test_what_was_accepted_and_not_done_is_done_after_a_restart(place: Workplace):
    run = await place.create()
    seq = await train(place, run, 1, steps=1)
    requests = [await place.compute(run, seq, [4]), await place.optim_step(run, seq + 1)]
    tick = place.dispatcher.choose()
    assert tick is not None, "it dies with this one under way"

    later = await place.restarted()
    await later.work()
    assert [(await later.outcome(one)).state for one in requests] == [State.DONE] * 2
    assert later.state(run).steps == 2


async def test_a_snapshot_is_where_a_restore_starts_and_what_it_includes_is_pruned(
    place: Workplace,
):
    run = await place.create()
    seq = await train(place, run, 1, steps=3)
    place.live(run).unsaved_s = 1.0
    await place.dispatcher._snapshot_all()
    before = values(place.state(run))
    assert place.live(run).run.snapshot_seq == seq - 1

    later = await place.restarted()
    later.backend.passes.clear()
    await later.compute(run, seq, [1], backward=False)
    await later.work()
    assert values(later.state(run)) == before
    assert later.backend.passes == [[run]], "only the new request was computed"


async def test_snapshots_are_taken_in_the_background_and_the_old_one_goes(db: Database, data: Path):
    place = Workplace(db, data, FakeBackend(), Clock(), snapshot_after_s=1e-9)
    run = await place.create()
    await train(place, run, 1, steps=2)
    assert place.live(run).run.snapshot_seq == 4
    assert len(list(place.storage.root.iterdir())) > 1
    place.clock.now += 61
    await place.checkpoints.remove_retired(set())
    assert [entry.name for entry in place.storage.root.iterdir()] == [
        place.live(run).run.snapshot_folder
    ]


async def test_stopping_puts_every_run_on_disk(place: Workplace):
    run = await place.create()
    looping = asyncio.create_task(place.dispatcher.run())
    request = await place.compute(run, 1, [3])
    await place.ledger.retrieve(request.id, request.owner, 5)
    place.dispatcher.stop()
    await looping
    assert place.live(run).run.snapshot_seq == 1


async def test_stopping_without_a_backend_ends_all_the_same(place: Workplace):
    run = await place.create()
    await train(place, run, 1, steps=1)
    place.backend.die_in["save"] = 0
    place.dispatcher.stop()
    await place.dispatcher.run()
    later = await place.restarted()
    await later.compute(run, 3, [1])
    await later.work()
    assert later.state(run).steps == 1


async def test_a_released_run_is_unloaded_and_comes_back_when_it_is_asked_for(place: Workplace):
    run = await place.create()
    await train(place, run, 1, steps=1)
    waiting = await place.compute(run, 3, [9])
    place.dispatcher.release([run])
    await place.round()
    before = values(place.state(run))
    assert before[2] == 9, "what waits is done first"

    await place.work()
    assert run not in place.backend.runs
    assert (await place.outcome(waiting)).state is State.DONE

    await place.compute(run, 4, [1], backward=False)
    await place.work()
    assert values(place.state(run)) == before


async def test_a_load_is_a_snapshot_at_once(place: Workplace):
    run = await place.create()
    await train(place, run, 1, steps=1)
    await place.save(run, 3, "good")
    await train(place, run, 4, steps=2)
    await place.load(run, 8, f"tinker://{run}/weights/good")
    await place.work()
    before = values(place.state(run))
    assert place.live(run).run.snapshot_seq == 8

    later = await place.restarted()
    await later.compute(run, 9, [1], backward=False)
    await later.work()
    assert values(later.state(run)) == before


async def test_a_worker_that_dies_right_after_a_load_does_it_again(place: Workplace):
    run = await place.create()
    await train(place, run, 1, steps=1)
    await place.save(run, 3, "good")
    await place.work()
    saved = values(place.state(run))
    place.backend.die_in["save"] = 0
    request = await place.load(run, 4, f"tinker://{run}/weights/good")
    await place.work()
    assert (await place.outcome(request)).state is State.DONE
    assert values(place.state(run)) == saved


async def test_a_replay_that_fails_is_not_passed_over(place: Workplace):
    """Going on would be with other weights than the client was told of."""
    run = await place.create()
    await train(place, run, 1, steps=1)
    place.backend.kill()
    step = place.backend.optim_step

    async def forget_the_run(steps: Any) -> Any:
        place.backend.runs.clear()
        return await step(steps)

    place.backend.optim_step = forget_the_run  # type: ignore[method-assign]
    request = await place.compute(run, 3, [1])
    await place.work()
    assert "cannot be repeated" in ((await place.outcome(request)).error or "")

    place.backend.optim_step = step  # type: ignore[method-assign]
    after = await place.compute(run, 4, [1])
    await place.work()
    assert (await place.outcome(after)).state is State.DONE
    assert place.state(run).steps == 1


async def test_a_number_that_came_late_is_not_moved_back_by_a_restart(place: Workplace):
    """Its client knows the step that ran without it."""
    run = await place.create()
    await place.compute(run, 1, [3])
    await place.optim_step(run, 3)
    await place.work()
    place.clock.now += 5
    await place.work()
    await place.compute(run, 2, [7])
    await place.work()
    before = values(place.state(run))
    assert before[2] == 7

    later = await place.restarted()
    await later.compute(run, 4, [1], backward=False)
    await later.work()
    assert values(later.state(run)) == before


async def test_a_number_missing_in_a_snapshot_counts_when_it_comes_after_a_restart(
    place: Workplace,
):
    run = await place.create()
    await place.compute(run, 1, [3])
    await place.compute(run, 3, [REFUSED_TOKEN])
    await place.work()
    place.clock.now += 5
    await place.work()
    await place.dispatcher._snapshot_all()
    assert place.live(run).run.snapshot_seq == 3

    second = await place.restarted()
    await second.compute(run, 2, [7])
    await second.work()
    assert second.state(run).gradient == 3 + 7
    third = await second.restarted()
    await third.compute(run, 4, [1], backward=False)
    await third.work()
    assert third.state(run).gradient == 3 + 7


async def test_a_restore_waits_for_the_results_that_are_being_written(place: Workplace):
    run = await place.create()
    await place.compute(run, 1, [3])
    await place.optim_step(run, 2)
    entered, go_on = asyncio.Event(), asyncio.Event()

    async def hold_the_writer(_: Any) -> None:
        entered.set()
        await go_on.wait()

    holding = asyncio.create_task(place.db.write(hold_the_writer))
    await entered.wait()
    first = place.dispatcher.choose()
    assert first is not None
    await place.dispatcher.step(first)
    place.backend.kill()
    second = asyncio.create_task(place.round())
    await asyncio.sleep(0.05)
    go_on.set()
    await asyncio.gather(holding, second)
    await place.dispatcher._recorder.recorded()
    assert place.state(run).moment == 3


class DyingDatabase(Database):
    """After so many writes the process is dead: nothing more is written, nobody hears more."""

    def __init__(self, url: str, writes: int) -> None:
        super().__init__(url)
        self.writes = writes
        self.dead = asyncio.Event()

    async def write(self, work: Any) -> Any:
        if self.writes <= 0:
            self.dead.set()
            await asyncio.Event().wait()
        self.writes -= 1
        return await super().write(work)


Script = list[Callable[[Workplace, Any], Any]]
"""What one client sends, one after the other; each is sent again after a crash."""


def script(path: str | None) -> Script:
    """Everything that has an effect, with a number (3) that comes after it was given up on."""
    name = path or ""
    return [
        lambda p, run: p.compute(run, 1, [3]),
        lambda p, run: p.optim_step(run, 2),
        lambda p, run: p.optim_step(run, 4),
        lambda p, run: p.compute(run, 3, [7]),
        lambda p, run: p.optim_step(run, 5),
        lambda p, run: p.save(run, 6, "good"),
        lambda p, run: p.compute(run, 7, [11]),
        lambda p, run: p.load(run, 8, name),
        lambda p, run: p.compute(run, 9, [13 + 1]),
        lambda p, run: p.publish(run, 10, 0, "inflight"),
        lambda p, run: p.optim_step(run, 11),
        lambda p, run: p.compute(run, 12, [2]),
    ]


async def play(place: Workplace, run: Any, step: Callable[[Workplace, Any], Any]) -> None:
    request = await step(place, run)
    await place.work()
    place.clock.now += 5.0
    await place.work()
    assert (await place.outcome(request)).state is State.DONE


@pytest.mark.parametrize("writes", range(26))
async def test_a_crash_before_any_write_changes_nothing_in_the_end(data: Path, writes: int):
    """No step is applied twice or skipped, whichever write is the last of the first process."""
    file = data / "hearth.db"
    db = DyingDatabase(sqlite_url(file), writes=10**9)
    db.start()
    place = Workplace(db, data, FakeBackend(), Clock())
    run = await place.create()
    db.writes = writes
    crashed = False
    for step in script(f"tinker://{run}/weights/good"):
        playing = asyncio.create_task(play(place, run, step))
        await settled(playing, db.dead)
        if not playing.done():
            playing.cancel()
            for task in place.dispatcher._recorder._commits:
                task.cancel()
            await asyncio.gather(
                playing, *place.dispatcher._recorder._commits, return_exceptions=True
            )
            assert not crashed
            crashed = True
            await db.stop()
            db = DyingDatabase(sqlite_url(file), writes=10**9)
            db.start()
            place = await place.restarted(db)
            await play(place, run, step)
        else:
            await playing

    oracle = FakeRun(place.state(run).spec)
    expected = _by_hand(oracle)
    assert values(place.state(run)) == pytest.approx(values(expected))
    await db.stop()


def _by_hand(state: FakeRun) -> FakeRun:
    def step() -> None:
        state.moment = 0.5 * state.moment + state.gradient
        state.weight = 0.9 * state.weight + 0.01 * state.moment
        state.gradient, state.steps = 0.0, state.steps + 1

    state.gradient = 3
    step()
    step()
    state.gradient = 7
    step()
    state.gradient = 14  # what had been added after the save was lost with the load
    step()
    state.gradient = 2
    return state


@pytest.mark.parametrize("seed", range(5))
async def test_deaths_of_the_worker_in_any_call_change_no_result(place: Workplace, seed: int):
    """As long as no request is hit twice."""
    chance = random.Random(seed)
    runs = [await place.create(), await place.create()]
    calm = FakeBackend()
    spec = place.state(runs[0]).spec
    calm.runs = {run: FakeRun(spec) for run in runs}
    for seq in range(1, 25):
        for run in runs:
            tokens = [chance.randrange(1, 60)]
            while 13 in tokens:
                tokens = [chance.randrange(1, 60)]
            if chance.random() < 0.6:
                await place.compute(run, seq, tokens)
                calm.runs[run].gradient += sum(tokens)
            else:
                await place.optim_step(run, seq)
                state = calm.runs[run]
                state.moment = 0.5 * state.moment + state.gradient
                state.weight = 0.9 * state.weight + 0.01 * state.moment
                state.gradient, state.steps = 0.0, state.steps + 1
        call = chance.choice(["forward_backward", "optim_step", "create", "load", "save"])
        place.backend.die_in = {call: 0} if chance.random() < 0.4 else {}
        for run in runs:
            place.live(run).unsaved_s += chance.choice([0.0, 1e10])
        await place.work()
        place.backend.die_in = {}

    for run in runs:
        await place.compute(run, 25, [1], backward=False)
    await place.work()
    for run in runs:
        assert values(place.state(run)) == pytest.approx(values(calm.runs[run]))


async def test_what_was_queued_behind_a_creation_that_failed_fails_with_its_reason(
    place: Workplace,
):
    """Restoring such a run would quietly train a fresh adapter."""
    source = await place.create()
    await place.save(source, 1, "gone")
    await place.work()
    path = f"tinker://{source}/weights/gone"
    session = await place.sessions.create(ME, CreateSession(), None)
    body = {"session_id": session.id, "model_seq_id": 0, "path": path, "optimizer": True}
    payload = bodies.encoded(body)
    load = parse_json(wire.LoadWeights, payload)
    created = await place.runs.create_from_checkpoint(ME, load, payload)
    run = created.run_id
    assert run is not None
    queued = [await place.save(run, 1, "mine"), await place.compute(run, 2, [1, 2, 3])]
    await place.checkpoints.delete(ME.id, parse_path(path))

    await place.work()

    for request in (created, *queued):
        outcome = await place.outcome(request)
        assert outcome.error_category == "user"
        assert outcome.error is not None
        assert "does not exist" in outcome.error
    for workplace in (place, await place.restarted()):
        with pytest.raises(BadInput, match="never created"):
            await workplace.compute(run, 3, [1])
