"""Choose, run, record: what goes together, what is visible when, and who fails alone."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy.exc import IntegrityError

from backends.contract import BackendError
from server.core.errors import BadInput, Gone, NotFound
from server.core.ids import RunId
from server.core.requests import Kind, State
from server.runs import wire
from server.store.database import Database
from server.tenancy.sessions import CreateSession
from server.wire.json_shapes import parse_json
from tests.databases import Clock
from tests.fake_backend import BUG_TOKEN, DEADLY_TOKEN, REFUSED_TOKEN, FakeBackend
from tests.unit.dispatch.workplace import ME, OTHER, Workplace


def kinds(ticks: list[Any]) -> list[list[str]]:
    return [[f"{job.kind}:{job.seq}" for job in tick.jobs] for tick in ticks]


async def test_requests_of_many_runs_go_in_one_pass_and_their_steps_in_another(place: Workplace):
    runs = [await place.create(), await place.create(OTHER)]
    for run, tenant in zip(runs, (ME, OTHER), strict=True):
        await place.compute(run, 1, [1, 2], tenant=tenant)
        await place.compute(run, 2, [3], tenant=tenant)
        await place.optim_step(run, 3, tenant)

    ticks = await place.work()
    assert [len(tick.jobs) for tick in ticks] == [4, 2]
    assert sorted(place.backend.passes[0]) == sorted(runs * 2)
    assert [place.state(run).steps for run in runs] == [1, 1]


async def test_a_result_is_on_disk_before_anyone_can_see_it(place: Workplace):
    run = await place.create()
    request = await place.compute(run, 1, [1])
    entered, go_on = asyncio.Event(), asyncio.Event()

    async def hold_the_writer(_: Any) -> None:
        entered.set()
        await go_on.wait()

    holding = asyncio.create_task(place.db.write(hold_the_writer))
    await entered.wait()
    tick = place.dispatcher.choose()
    assert tick is not None
    await place.dispatcher.step(tick)
    assert place.backend.passes, "the next pass does not wait for the commit of this one"
    assert (await place.outcome(request)).state is State.WAITING

    go_on.set()
    await holding
    await place.dispatcher._recorder.recorded()
    assert (await place.outcome(request)).state is State.DONE


async def test_requests_run_by_number_whatever_order_they_arrive_in(place: Workplace):
    run = await place.create()
    await place.optim_step(run, 3)
    await place.compute(run, 2, [5])
    assert await place.work() == []
    await place.compute(run, 1, [7])

    assert kinds(await place.work()) == [
        ["forward_backward:1", "forward_backward:2"],
        ["optim_step:3"],
    ]


async def test_a_missing_number_is_given_up_on_and_still_runs_when_it_comes(place: Workplace):
    run = await place.create()
    await place.compute(run, 2, [5])
    assert await place.work() == []
    place.clock.now += 5.0
    assert kinds(await place.work()) == [["forward_backward:2"]]

    late = await place.compute(run, 1, [7])
    assert kinds(await place.work()) == [["forward_backward:1"]]
    assert (await place.outcome(late)).state is State.DONE
    assert place.state(run).gradient == 12


async def test_the_loop_itself_wakes_when_a_gap_has_been_waited_for(
    place: Workplace, monkeypatch: pytest.MonkeyPatch
):
    run = await place.create()
    request = await place.compute(run, 2, [5])
    looping = asyncio.create_task(place.dispatcher.run())
    place.clock.now += 5.0
    place.dispatcher.wake()
    async with asyncio.timeout(5):
        found = await place.ledger.retrieve(request.id, ME.id, 5)
    assert found.state is State.DONE
    place.dispatcher.stop()
    await looping


async def test_a_refused_request_uses_up_its_number(place: Workplace):
    run = await place.create()
    with pytest.raises(BadInput, match="learning_rate"):
        await place.submit(
            Kind.OPTIM_STEP, model_id=run, seq_id=1, adam_params={"learning_rate": -1.0}
        )
    refused = await place.compute(run, 2, [1000])
    assert (await place.outcome(refused)).error_category == "user"

    await place.compute(run, 3, [1])
    assert kinds(await place.work()) == [["forward_backward:3"]]


async def test_a_datum_that_fails_fails_its_request_and_no_gradient(place: Workplace):
    runs = [await place.create(), await place.create()]
    bad = await place.compute(runs[0], 1, [REFUSED_TOKEN])
    good = await place.compute(runs[1], 1, [4])
    assert len(await place.work()) == 1

    assert (await place.outcome(bad)).error_category == "user"
    assert (await place.outcome(good)).state is State.DONE
    assert [place.state(run).gradient for run in runs] == [0, 4]


async def test_a_backend_that_dies_is_started_again_and_no_client_notices(place: Workplace):
    run = await place.create()
    await place.compute(run, 1, [3])
    await place.optim_step(run, 2)
    await place.work()
    before = place.state(run)
    place.backend.die_in["forward_backward"] = 0
    request = await place.compute(run, 3, [5])
    await place.work()

    assert (await place.outcome(request)).state is State.DONE
    assert place.state(run) is not before
    assert (place.state(run).weight, place.state(run).gradient) == (before.weight, 5)
    assert place.backend.generation == 2


async def test_a_request_that_kills_the_backend_twice_fails_alone(place: Workplace):
    runs = [await place.create() for _ in range(3)]
    tokens = [[1], [DEADLY_TOKEN], [2]]
    requests = [await place.compute(run, 1, t) for run, t in zip(runs, tokens, strict=True)]
    await place.work()

    outcomes = [await place.outcome(request) for request in requests]
    assert [one.state for one in outcomes] == [State.DONE, State.FAILED, State.DONE]
    assert outcomes[1].error_category == "server"
    assert "worker ended" in (outcomes[1].error or "")

    after = [await place.compute(run, 2, [9]) for run in runs]
    await place.work()
    assert [(await place.outcome(one)).state for one in after] == [State.DONE] * 3
    assert [place.state(run).gradient for run in runs] == [1 + 9, 9, 2 + 9]


async def test_a_sample_that_restarts_the_worker_fails_no_training(place: Workplace):
    """It is another generation by the time the pass is through: its answers mean nothing."""
    runs = [await place.create(), await place.create()]
    await place.work()
    create = place.backend.create

    async def then_restart(run: str, spec: Any) -> None:
        await create(run, spec)
        if run == runs[0]:
            place.backend.create = create  # type: ignore[method-assign]
            place.backend.kill()
            place.backend.alive = True
            place.backend.generation += 1

    place.backend.kill()
    place.backend.create = then_restart  # type: ignore[method-assign]
    requests = [await place.compute(run, 1, [3]) for run in runs]
    await place.work()
    assert [(await place.outcome(one)).state for one in requests] == [State.DONE, State.DONE]


async def test_an_error_nobody_expected_fails_its_tick_and_the_loop_goes_on(place: Workplace):
    run, other = await place.create(), await place.create()
    await place.compute(other, 1, [8])
    await place.work()
    bug = await place.compute(run, 1, [BUG_TOKEN])
    looping = asyncio.create_task(place.dispatcher.run())
    async with asyncio.timeout(5):
        failed = await place.ledger.retrieve(bug.id, ME.id, 5)
        after = await place.compute(run, 2, [6])
        fine = await place.ledger.retrieve(after.id, ME.id, 5)
    place.dispatcher.stop()
    await looping

    assert failed.error == "the backend failed: ZeroDivisionError: a bug of the backend"
    assert failed.error_category == "server"
    assert fine.state is State.DONE
    assert place.state(run).gradient == 6, "what the failed pass had added is not undone"


async def test_the_loop_outlives_a_worker_that_dies_while_a_run_is_put_away(place: Workplace):
    run = await place.create()
    await place.compute(run, 1, [3])
    await place.work()
    place.backend.die_in["save"] = 0
    looping = asyncio.create_task(place.dispatcher.run())
    place.dispatcher.release([run])
    await asyncio.sleep(0.05)
    request = await place.compute(run, 2, [4])
    async with asyncio.timeout(5):
        assert (await place.ledger.retrieve(request.id, ME.id, 5)).state is State.DONE
    place.dispatcher.stop()
    await looping
    assert place.state(run).gradient == 7


async def test_the_loop_outlives_a_choice_that_fails(
    place: Workplace, monkeypatch: pytest.MonkeyPatch
):
    run = await place.create()
    choose, failures = place.dispatcher.choose, [ZeroDivisionError("a bug")]

    def fail_once() -> Any:
        if failures:
            raise failures.pop()
        return choose()

    monkeypatch.setattr(place.dispatcher, "choose", fail_once)
    looping = asyncio.create_task(place.dispatcher.run())
    request = await place.compute(run, 1, [4])
    async with asyncio.timeout(5):
        assert (await place.ledger.retrieve(request.id, ME.id, 5)).state is State.DONE
    place.dispatcher.stop()
    await looping


async def test_an_outcome_that_the_database_refuses_is_told_as_a_failure(
    place: Workplace, monkeypatch: pytest.MonkeyPatch
):
    run = await place.create()
    request = await place.publish(run, 1, 0, "snapshot")
    finish_all, refused = place.ledger.finish_all, [1]

    async def refuse_once(*arguments: Any) -> None:
        if refused:
            refused.pop()
            raise IntegrityError("INSERT", {}, Exception("not unique"))
        await finish_all(*arguments)

    monkeypatch.setattr(place.ledger, "finish_all", refuse_once)
    await place.work()
    found = await place.outcome(request)
    assert found.error == "its outcome could not be stored: IntegrityError"
    assert found.error_category == "server"


async def test_another_tenants_run_cannot_be_trained(place: Workplace):
    run = await place.create()
    with pytest.raises(NotFound):
        await place.compute(run, 1, [1], tenant=OTHER)
    with pytest.raises(NotFound):
        await place.compute(RunId("none"), 1, [1])


async def test_a_finished_session_takes_no_more_and_finishes_what_it_took(place: Workplace):
    run = await place.create()
    request = await place.compute(run, 1, [1])
    session = place.live(run).run.session_id
    await place.sessions.finish(ME, session, "success", None)
    with pytest.raises(Gone):
        await place.compute(run, 2, [1])
    await place.work()
    assert (await place.outcome(request)).state is State.DONE


async def test_creating_a_run_again_is_the_same_request(place: Workplace):
    session = await place.sessions.create(ME, CreateSession(), None)
    body = {"session_id": session.id, "model_seq_id": 0, "base_model": "tiny/fake"}
    payload = json.dumps(body).encode()
    create = parse_json(wire.CreateModel, payload)
    both = await asyncio.gather(*(place.runs.create(ME, create, payload) for _ in range(3)))
    await place.work()

    assert len({one.id for one in both}) == 1
    assert place.backend.calls.count("create") == 1
    assert place.live(both[0].run_id).queue.done_through == 0


async def test_a_run_used_by_many_at_once_is_loaded_once(place: Workplace):
    run = await place.create()
    later = await place.restarted()
    lives = await asyncio.gather(*(later.runs.registry.get(run, ME.id) for _ in range(10)))
    assert len({id(live) for live in lives}) == 1


async def test_forward_leaves_no_gradient_and_is_not_repeated(place: Workplace):
    run = await place.create()
    await place.compute(run, 1, [5], backward=False)
    await place.work()
    assert place.state(run).gradient == 0
    later = await place.restarted()
    await later.compute(run, 2, [3])
    await later.work()
    assert later.backend.passes == [[run], [run]]


async def test_the_least_served_tenant_goes_first(db: Database, data: Path):
    place = Workplace(db, data, FakeBackend(), Clock(), token_budget=100)
    flood, small = await place.create(), await place.create(OTHER)
    for seq in range(1, 40):
        await place.compute(flood, seq, [1] * 60)
    for _ in range(5):
        await place.round()
    request = await place.compute(small, 1, [1] * 4, tenant=OTHER)
    await place.round()
    assert (await place.outcome(request)).state is State.DONE
    await place.dispatcher._recorder.recorded()


async def test_a_backend_that_refuses_a_call_fails_that_request(place: Workplace):
    run = await place.create()

    async def refuse(*_: Any) -> int:
        raise BackendError("the disk is full")

    place.backend.save = refuse  # type: ignore[method-assign]
    request = await place.save(run, 1, "name")
    await place.work()
    found = await place.outcome(request)
    assert (found.error, found.error_category) == (
        "the backend failed: the disk is full",
        "server",
    )
