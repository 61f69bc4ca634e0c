"""Keys and sessions: what crosses on its way, and what is remembered."""

from __future__ import annotations

import asyncio

import pytest

from server.core.errors import Gone, NotAuthenticated, NotFound
from server.core.ids import TenantId
from server.core.recent import Recent
from server.core.records import SessionStatus, Tenant
from server.store.database import Database
from server.tenancy.keys import LOCAL, Keys
from server.tenancy.sessions import CreateSession, Sessions
from tests.databases import Clock

ME, OTHER = Tenant(id=TenantId("me")), Tenant(id=TenantId("other"))


@pytest.fixture
def sessions(db: Database, clock: Clock) -> Sessions:
    return Sessions(db, clock)


async def test_without_a_key_everybody_is_the_local_user(db: Database, clock: Clock):
    keys = Keys(db, clock)
    await keys.start()
    assert await keys.authenticate(None) == LOCAL
    assert await keys.authenticate("tml-anything") == LOCAL


async def test_from_the_first_key_on_one_is_needed(db: Database, clock: Clock):
    keys = Keys(db, clock)
    key = await keys.create("ann", "tenant", "apollo")
    for again in (keys, Keys(db, clock)):
        await again.start()
        who = await again.authenticate(key)
        assert (who.id, who.project, who.name) == ("tenant", "apollo", "ann")
        for wrong in (None, "", "tml-wrong"):
            with pytest.raises(NotAuthenticated):
                await again.authenticate(wrong)


async def test_a_key_is_stored_nowhere(db: Database, clock: Clock, data: object):
    key = await Keys(db, clock).create("ann", "ann", "default")
    listed = await Keys(db, clock).all()
    assert all(key not in str(row) for row in listed)


async def test_a_revoked_key_stays_needed(db: Database, clock: Clock):
    keys = Keys(db, clock)
    key = await keys.create("ann", "ann", "default")
    assert await keys.revoke("ann") == 1
    assert await keys.revoke("ann") == 0
    with pytest.raises(NotAuthenticated):
        await keys.authenticate(key)
    later = Keys(db, clock)
    await later.start()
    assert later.required, "revoking the last key does not open the server to everybody"


async def test_a_heartbeat_that_crosses_the_finish_does_not_undo_it(sessions: Sessions):
    session = (await sessions.create(ME, CreateSession(), None)).id
    results = await asyncio.gather(
        sessions.finish(ME, session, "success", None),
        sessions.heartbeat(ME, session),
        return_exceptions=True,
    )
    assert isinstance(results[1], Gone)
    with pytest.raises(Gone):
        await sessions.open(ME, session)


async def test_the_end_by_silence_does_not_undo_the_finish(sessions: Sessions, clock: Clock):
    session = (await sessions.create(ME, CreateSession(), None)).id
    clock.now += 1000
    await asyncio.gather(sessions.finish(ME, session, "success", None), sessions.expire_silent(500))
    assert (await sessions.get(ME, session)).status is SessionStatus.FINISHED


async def test_a_heartbeat_that_crosses_the_sweep_keeps_the_session(
    sessions: Sessions, clock: Clock
):
    session = (await sessions.create(ME, CreateSession(), None)).id
    clock.now += 1000
    _, silent = await asyncio.gather(sessions.heartbeat(ME, session), sessions.expire_silent(500))
    assert silent == []
    assert (await sessions.get(ME, session)).status is SessionStatus.ACTIVE


async def test_a_silent_session_can_still_be_finished(sessions: Sessions, clock: Clock):
    session = (await sessions.create(ME, CreateSession(), None)).id
    clock.now += 1000
    assert await sessions.expire_silent(500) == [session]
    assert await sessions.expire_silent(500) == []
    await sessions.finish(ME, session, "errored", "late")
    with pytest.raises(Gone):
        await sessions.open(ME, session)


async def test_the_first_reason_of_a_finish_stands(sessions: Sessions):
    session = (await sessions.create(ME, CreateSession(), None)).id
    await sessions.finish(ME, session, "errored", "why")
    await sessions.finish(ME, session, "success", None)
    found = await sessions.get(ME, session)
    assert (found.finish_reason, found.finish_detail) == ("errored", "why")


async def test_a_read_under_way_does_not_bring_back_what_was_finished(
    db: Database, sessions: Sessions, clock: Clock, monkeypatch: pytest.MonkeyPatch
):
    session = (await sessions.create(ME, CreateSession(), None)).id
    later, read, arrived, go_on = Sessions(db, clock), db.read, asyncio.Event(), asyncio.Event()

    async def slow_read(work):
        found = await read(work)
        arrived.set()
        await go_on.wait()
        return found

    monkeypatch.setattr(db, "read", slow_read)
    getting = asyncio.create_task(later.get(ME, session))
    await arrived.wait()
    monkeypatch.setattr(db, "read", read)
    await later.finish(ME, session, "success", None)
    go_on.set()
    await getting
    assert (await later.get(ME, session)).status is SessionStatus.FINISHED


async def test_a_foreign_session_looks_like_none(sessions: Sessions):
    session = (await sessions.create(ME, CreateSession(), None)).id
    for call in (sessions.get, sessions.open, sessions.heartbeat):
        with pytest.raises(NotFound):
            await call(OTHER, session)


async def test_two_tenants_may_send_the_same_idempotency_key(sessions: Sessions):
    mine = await sessions.create(ME, CreateSession(), "key")
    theirs = await sessions.create(OTHER, CreateSession(), "key")
    again = await asyncio.gather(*(sessions.create(ME, CreateSession(), "key") for _ in range(3)))
    assert mine.id != theirs.id
    assert {session.id for session in again} == {mine.id}


async def test_what_is_remembered_is_bounded(sessions: Sessions):
    sessions._known = Recent(most=3)
    made = [(await sessions.create(ME, CreateSession(), None)).id for _ in range(10)]
    assert len(sessions._known) == 3
    for session in made:
        assert (await sessions.get(ME, session)).id == session
