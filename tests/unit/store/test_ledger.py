"""Submit once, finish once, wake whoever waits."""

from __future__ import annotations

import asyncio
import sqlite3
from typing import Any

import pytest
from sqlalchemy import event, text
from sqlalchemy.exc import IntegrityError, OperationalError
from sqlalchemy.ext.asyncio import AsyncSession

from server.core.errors import Gone, NotFound
from server.core.ids import CLONE_SIZE
from server.core.requests import Kind, State
from server.store import journal
from server.store import ledger as ledger_module
from server.store.database import Database
from server.store.ledger import Ledger, Outcome
from tests.databases import Clock
from tests.unit.store.material import ME, OTHER, RUN, SAMPLER, request, sample

DONE = Outcome(result=b"result", result_type="application/json")


async def stored(db: Database, id_: str) -> Any:
    found = await db.read(lambda s: journal.find(s, id_))
    assert found is not None
    return found


def break_writes(db: Database, times: int, error: type[Exception]) -> None:
    """Make the next updates of the journal fail."""
    left = times

    def fail(_: Any, __: Any, statement: str, *___: Any) -> None:
        nonlocal left
        if statement.startswith("UPDATE requests") and left > 0:
            left -= 1
            raise error(statement, {}, sqlite3.OperationalError("disk full"))

    event.listen(db.engine.sync_engine, "before_cursor_execute", fail)


async def test_submitting_twice_gives_the_same_request_and_one_to_do(ledger: Ledger):
    first, second = await asyncio.gather(ledger.submit(request(1)), ledger.submit(request(1)))

    assert first[0].id == second[0].id
    assert sorted([first[1], second[1]]) == [False, True]
    assert await ledger.submit(request(1)) == (first[0], False)


async def test_what_comes_with_a_request_comes_once(ledger: Ledger):
    calls = []

    async def also(_: AsyncSession) -> None:
        calls.append(1)

    await ledger.submit(request(1), also=also)
    await ledger.submit(request(1), also=also)
    assert calls == [1]


async def test_a_request_whose_submitter_went_away_is_given_to_the_next(ledger: Ledger):
    """Its commit went through; without this nobody would carry it out before a restart."""
    gone = asyncio.create_task(ledger.submit(request(1)))
    await asyncio.sleep(0)
    gone.cancel()
    with pytest.raises(asyncio.CancelledError):
        await gone

    _, mine = await ledger.submit(request(1))
    assert mine
    _, again = await ledger.submit(request(1))
    assert not again


async def test_a_finished_request_is_nobodys_to_do(ledger: Ledger):
    first, _ = await ledger.submit(request(1))
    await ledger.finish(first, DONE)
    again, mine = await ledger.submit(request(1))
    assert (again.state, mine) == (State.DONE, False)


async def test_the_first_outcome_stands(ledger: Ledger):
    first, _ = await ledger.submit(request(1))
    await ledger.finish(first, DONE)
    await ledger.finish(first, Outcome(error="too late", error_category="server"))

    assert (await ledger.retrieve(first.id, ME, 0)).result == b"result"
    assert (await stored(ledger.db, first.id)).state is State.DONE


async def test_an_outcome_is_visible_only_after_its_commit(ledger: Ledger):
    first, _ = await ledger.submit(request(1))
    entered, go_on = asyncio.Event(), asyncio.Event()

    async def also(_: AsyncSession) -> None:
        entered.set()
        await go_on.wait()

    finishing = asyncio.create_task(ledger.finish(first, DONE, also))
    await entered.wait()
    assert (await ledger.retrieve(first.id, ME, 0)).state is State.WAITING
    go_on.set()
    await finishing
    assert (await ledger.retrieve(first.id, ME, 0)).state is State.DONE


async def test_a_long_poll_ends_with_the_result_and_asks_the_database_for_nothing(
    ledger: Ledger,
):
    first, _ = await ledger.submit(request(1))
    statements: list[str] = []
    event.listen(
        ledger.db.engine.sync_engine,
        "before_cursor_execute",
        lambda _, __, statement, *___: statements.append(statement),
    )
    polls = [asyncio.create_task(ledger.retrieve(first.id, ME, 30)) for _ in range(20)]
    await asyncio.sleep(0.02)
    assert statements == []

    await ledger.finish(first, DONE)
    async with asyncio.timeout(5):
        assert {(await poll).result for poll in polls} == {b"result"}
    assert not any(statement.startswith("SELECT") for statement in statements)


async def test_a_result_that_comes_between_looking_and_waiting_is_not_missed(
    ledger: Ledger, monkeypatch: pytest.MonkeyPatch
):
    first, _ = await ledger.submit(request(1))
    look = ledger._look

    async def look_then_finish(id_: Any, owner: Any) -> Any:
        found = await look(id_, owner)
        if found.state is State.WAITING:
            await ledger.finish(first, DONE)
        return found

    monkeypatch.setattr(ledger, "_look", look_then_finish)
    async with asyncio.timeout(5):
        assert (await ledger.retrieve(first.id, ME, 30)).state is State.DONE


async def test_a_poll_for_what_is_not_ready_ends_after_its_hold(ledger: Ledger):
    first, _ = await ledger.submit(request(1))
    assert (await ledger.retrieve(first.id, ME, 0.01)).state is State.WAITING


async def test_going_away_ends_every_wait(ledger: Ledger):
    first, _ = await ledger.submit(request(1))
    poll = asyncio.create_task(ledger.retrieve(first.id, ME, 30))
    follow = asyncio.create_task(ledger.completions(SAMPLER, 0, 0, 30))
    await asyncio.sleep(0.02)
    ledger.wake_all()
    async with asyncio.timeout(5):
        assert (await poll).state is State.WAITING
        assert await follow == ([], 0)


@pytest.mark.parametrize("where", ["waiting", "recent", "database"])
async def test_anothers_request_looks_like_none(ledger: Ledger, where: str):
    first, _ = await ledger.submit(request(1))
    if where != "waiting":
        await ledger.finish(first, DONE)
    if where == "database":
        ledger = Ledger(ledger.db, Clock())
    for id_, owner in ((first.id, OTHER), ("nothing", ME)):
        with pytest.raises(NotFound, match="does not exist"):
            await ledger.retrieve(id_, owner, 0)


async def test_an_expired_result_is_gone_and_an_error_is_not(ledger: Ledger, clock: Clock):
    done, _ = await ledger.submit(request(1))
    failed, _ = await ledger.submit(request(2))
    await ledger.finish(done, DONE)
    await ledger.finish(failed, Outcome(error="no", error_category="user"))
    await ledger.db.write(lambda s: journal.expire_results(s, 0.0, clock() + 1))

    later = Ledger(ledger.db, clock)
    with pytest.raises(Gone, match="expired"):
        await later.retrieve(done.id, ME, 0)
    assert (await later.retrieve(failed.id, ME, 0)).error == "no"


async def test_a_disk_that_is_full_for_a_while_loses_no_outcome(
    ledger: Ledger, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(ledger_module, "_RETRY_S", 0.01)
    first, _ = await ledger.submit(request(1))
    break_writes(ledger.db, times=3, error=OperationalError)
    poll = asyncio.create_task(ledger.retrieve(first.id, ME, 30))
    await ledger.finish(first, DONE)
    assert (await poll).result == b"result"
    assert (await stored(ledger.db, first.id)).result == b"result"


async def test_what_comes_with_an_outcome_comes_with_it_or_not_at_all(ledger: Ledger):
    first, _ = await ledger.submit(request(1))

    async def also(db: AsyncSession) -> None:
        await db.execute(text("UPDATE runs SET project = 'changed'"))
        raise IntegrityError("INSERT", {}, sqlite3.IntegrityError("not unique"))

    with pytest.raises(IntegrityError):
        await ledger.finish(first, DONE, also)
    assert (await stored(ledger.db, first.id)).state is State.WAITING
    projects = await ledger.db.read(lambda s: s.scalars(text("SELECT project FROM runs")))
    assert list(projects) == ["default"]
    assert ledger.waiting(first.id).id == first.id


async def test_outcomes_that_belong_together_are_stored_together(ledger: Ledger):
    requests = [(await ledger.submit(request(seq)))[0] for seq in (1, 2)]
    await ledger.finish_all([(one, DONE) for one in requests])
    assert [(await ledger.retrieve(one.id, ME, 0)).state for one in requests] == [State.DONE] * 2


async def test_a_restart_finds_what_is_unfinished_and_numbers_on(ledger: Ledger, clock: Clock):
    done, _ = await ledger.submit(sample(0))
    await ledger.submit(request(2))
    await ledger.submit(request(1))
    await ledger.finish(done, DONE)

    later = Ledger(ledger.db, clock)
    unfinished = await later.start()
    assert [one.seq for one in unfinished] == [1, 2]
    assert unfinished[0].payload == b"body"
    assert later.waiting(unfinished[0].id).payload is None
    second, _ = await later.submit(sample(1))
    await later.finish(second, DONE)
    assert (await stored(ledger.db, second.id)).finished_no == 2


async def test_completions_follow_a_cursor(ledger: Ledger):
    requests = [(await ledger.submit(sample(seq)))[0] for seq in range(3)]
    await ledger.finish(requests[2], DONE)
    await ledger.finish(requests[0], Outcome(error="no", error_category="user"))

    first, cursor = await ledger.completions(SAMPLER, 0, 0, 0)
    assert [(one.request, one.state, one.result_bytes) for one in first] == [
        (requests[2].id, State.DONE, len(b"result")),
        (requests[0].id, State.FAILED, 0),
    ]
    assert await ledger.completions(SAMPLER, 0, cursor, 0) == ([], cursor)

    await ledger.finish(requests[1], DONE)
    more, _ = await ledger.completions(SAMPLER, 0, cursor, 0)
    assert [one.request for one in more] == [requests[1].id]


async def test_completions_are_told_to_the_client_copy_they_belong_to(ledger: Ledger):
    for seq in (5, CLONE_SIZE + 5, 2 * CLONE_SIZE):
        one, _ = await ledger.submit(sample(seq))
        await ledger.finish(one, DONE)

    for clone, seq in ((0, 5), (1, CLONE_SIZE + 5), (2, 2 * CLONE_SIZE), (3, None)):
        found, _ = await ledger.completions(SAMPLER, clone, 0, 0)
        assert [one.request for one in found] == ([f"{SAMPLER}:{seq}"] if seq is not None else [])


async def test_completions_are_waited_for(ledger: Ledger):
    one, _ = await ledger.submit(sample(0))
    follow = asyncio.create_task(ledger.completions(SAMPLER, 0, 0, 30))
    await asyncio.sleep(0.02)
    await ledger.finish(one, DONE)
    async with asyncio.timeout(5):
        assert [found.request for found in (await follow)[0]] == [one.id]


async def test_a_cursor_never_passes_an_outcome_that_is_stored_later(
    ledger: Ledger, monkeypatch: pytest.MonkeyPatch
):
    """The first outcome's commit fails once, so that the second is stored before it."""
    monkeypatch.setattr(ledger_module, "_RETRY_S", 0.05)
    requests = [(await ledger.submit(sample(seq)))[0] for seq in (0, 1)]
    break_writes(ledger.db, times=1, error=OperationalError)
    delayed = asyncio.create_task(ledger.finish(requests[0], DONE))
    await asyncio.sleep(0.02)
    await ledger.finish(requests[1], DONE)

    seen, cursor = await ledger.completions(SAMPLER, 0, 0, 0)
    assert [one.request for one in seen] == [requests[1].id]
    await delayed
    later, _ = await ledger.completions(SAMPLER, 0, cursor, 0)
    assert [one.request for one in later] == [requests[0].id]


async def test_results_in_memory_stay_under_their_limit():
    recent = ledger_module._RecentResults(max_bytes=3000)
    for seq in range(100):
        one = ledger_module.replace(request(seq), payload=None, result=b"x" * 400)
        recent.put(one)
    assert recent._bytes <= 3000
    assert recent.get(f"{RUN}:99") is not None
    assert recent.get(f"{RUN}:0") is None


@pytest.mark.parametrize("kind", list(Kind))
async def test_a_payload_is_kept_only_where_it_may_be_played_again(ledger: Ledger, kind: Kind):
    first, _ = await ledger.submit(request(1, kind))
    await ledger.finish(first, DONE)
    kept = (await stored(ledger.db, first.id)).payload is not None
    assert kept == (kind in {Kind.FORWARD_BACKWARD, Kind.OPTIM_STEP})
