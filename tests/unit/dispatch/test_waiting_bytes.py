"""How much training data one tenant may have waiting."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from server.core.errors import PassesFull
from server.core.requests import State
from server.store.database import Database
from tests import bodies
from tests.databases import Clock
from tests.fake_backend import REFUSED_TOKEN, FakeBackend
from tests.unit.dispatch.workplace import ME, OTHER, Workplace

TOKENS = [1] * 50


def room_for(requests: int, db: Database, data: Path) -> Workplace:
    size = len(
        bodies.encoded(bodies.forward_backward("session-0123456789abcdef:train:0", 1, TOKENS))
    )
    return Workplace(db, data, FakeBackend(), Clock(), max_pass_bytes=requests * size)


@pytest.fixture
def place(db: Database, data: Path) -> Workplace:
    return room_for(2, db, data)


async def test_more_than_that_is_refused_until_some_is_done(place: Workplace):
    run = await place.create()
    for seq in (1, 2):
        await place.compute(run, seq, TOKENS)
    with pytest.raises(PassesFull, match="come back shortly"):
        await place.compute(run, 3, TOKENS)
    await place.work()
    request = await place.compute(run, 3, TOKENS)
    await place.work()
    assert (await place.outcome(request)).state is State.DONE


async def test_room_that_is_made_soon_is_waited_for(db: Database, data: Path):
    place = Workplace(db, data, FakeBackend(), Clock(), max_pass_bytes=1, room_wait_s=60.0)
    run = await place.create()
    await place.compute(run, 1, TOKENS)
    second = asyncio.create_task(place.compute(run, 2, TOKENS))
    await asyncio.sleep(0.05)
    assert not second.done()
    await place.work()
    request = await second
    await place.work()
    assert (await place.outcome(request)).state is State.DONE


async def test_it_is_counted_by_tenant(place: Workplace):
    runs = [await place.create(), await place.create(), await place.create(OTHER)]
    for run in runs[:2]:
        await place.compute(run, 1, TOKENS)
    with pytest.raises(PassesFull):
        await place.compute(runs[0], 2, TOKENS)
    await place.compute(runs[2], 1, TOKENS, tenant=OTHER)


async def test_steps_and_saves_find_room_always(place: Workplace):
    run = await place.create()
    for seq in (1, 2):
        await place.compute(run, seq, TOKENS)
    await place.optim_step(run, 3)
    await place.save(run, 4, "name")
    assert len(await place.work()) == 3


async def test_whoever_has_nothing_waiting_may_send_anything(place: Workplace):
    run = await place.create()
    await place.compute(run, 1, *[TOKENS] * 10)
    with pytest.raises(PassesFull):
        await place.compute(run, 2, [1])
    await place.work()
    await place.compute(run, 2, [1])


async def test_a_number_that_others_wait_for_is_let_in(place: Workplace):
    """The SDK sends the first chunk of a batch last: refused, it would keep the rest waiting."""
    run = await place.create()
    for seq in (3, 2):
        await place.compute(run, seq, TOKENS)
    await place.compute(run, 1, TOKENS)
    assert [job.seq for tick in await place.work() for job in tick.jobs] == [1, 2, 3]


async def test_what_was_accepted_is_not_refused_when_it_is_sent_again(place: Workplace):
    run = await place.create()
    first = await place.compute(run, 1, TOKENS)
    await place.compute(run, 2, TOKENS)
    assert (await place.compute(run, 1, TOKENS)).id == first.id


async def test_what_fails_makes_room_too(place: Workplace):
    run = await place.create()
    for seq in (1, 2):
        await place.compute(run, seq, [REFUSED_TOKEN, *[1] * 48])
    await place.work()
    refused = await place.compute(run, 3, [1000] * 50)
    assert (await place.outcome(refused)).state is State.FAILED
    assert place.runs.registry.pass_bytes(ME.id) == 0


async def test_many_that_come_at_once_find_no_more_room(place: Workplace):
    run = await place.create()
    sent = [place.compute(run, seq, TOKENS) for seq in range(1, 9)]
    answers = await asyncio.gather(*sent, return_exceptions=True)
    assert sum(isinstance(answer, PassesFull) for answer in answers) >= 5


async def test_what_waits_counts_after_a_restart(db: Database, data: Path, place: Workplace):
    run = await place.create()
    for seq in (1, 2):
        await place.compute(run, seq, TOKENS)
    later = room_for(2, db, data)
    await later.runs.resume(await later.ledger.start())
    with pytest.raises(PassesFull):
        await later.compute(run, 3, TOKENS)
