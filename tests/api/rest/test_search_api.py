"""Sessions are found by every filter of the SDK, newest first, page by page."""

from __future__ import annotations

from typing import Any

import pytest

from tests.api.rest.service import Api

URN = "tml:organization_user:alice"


async def search(api: Api, **query: Any) -> list[str]:
    return [one["session_id"] for one in (await api.post("sessions/search", query))["sessions"]]


async def three(api: Api) -> list[str]:
    """Sessions a second apart, the oldest first."""
    made = []
    for fields in (
        {"display_name": "Run Ärger one", "user_metadata": {"team": "red", "n": 1}},
        {"display_name": "run two", "user_metadata": {"team": "red"}, "project_id": "p2"},
        {"user_metadata": {"team": "blue"}},
    ):
        made.append(await api.session(**fields))
        api.clock.now += 1
    return made


async def test_without_a_filter_all_come_newest_first(alice: Api):
    first, second, third = await three(alice)
    assert await search(alice) == [third, second, first]


async def test_each_filter_keeps_what_it_names(alice: Api):
    first, second, third = await three(alice)
    assert await search(alice, session_id=second) == [second]
    assert await search(alice, session_id="session-none") == []
    assert await search(alice, project_ids=["p2", "p3"]) == [second]
    assert await search(alice, project_ids=[]) == []
    assert await search(alice, user_metadata={"team": "red"}) == [second, first]
    assert await search(alice, user_metadata={"team": "red", "n": "1"}) == [first]
    assert await search(alice, user_metadata={'"': "x"}) == []
    assert await search(alice, display_name="RUN") == [second, first]
    assert await search(alice, display_name="one ärger") == [first]
    assert await search(alice, display_name="%") == []
    assert await search(alice, display_name="two", user_metadata={"team": "blue"}) == []
    assert await search(alice, owner={"type": "own"}) == [third, second, first]
    assert await search(alice, owner={"type": "accessible"}) == [third, second, first]
    assert await search(alice, owner={"type": "user", "owner_urns": [URN]}) == [
        third,
        second,
        first,
    ]
    assert await search(alice, owner={"type": "user", "owner_urns": ["x"]}) == []


async def test_a_session_matches_by_its_id_or_by_its_name(alice: Api):
    _, second, third = await three(alice)
    assert await search(alice, session_id=third, display_name="two") == [third, second]


async def test_statuses_are_told_and_found(alice: Api):
    first, second, third = await three(alice)
    ended = {"reason": {"type": "errored"}, "detail": "out of luck"}
    await alice.post(f"sessions/{first}/finish", ended)
    await alice.post(f"sessions/{second}/finish", {"reason": {"type": "success"}})

    async def by(*statuses: dict[str, Any]) -> list[str]:
        return await search(alice, statuses=list(statuses))

    assert await by({"type": "active"}) == [third]
    assert await by({"type": "client_finished"}) == [second, first]
    assert await by({"type": "client_finished", "reasons": ["errored"]}) == [first]
    assert await by({"type": "active"}, {"type": "client_finished", "reasons": ["success"]}) == [
        third,
        second,
    ]
    assert await by({"type": "failed"}, {"type": "cancelled"}) == []
    found = (await alice.post("sessions/search", {}))["sessions"]
    assert [one["status"] for one in found] == [
        {"type": "active"},
        {"type": "client_finished", "reason": {"type": "success"}},
        {
            "type": "client_finished",
            "reason": {"type": "errored"},
            "detail": "out of luck",
        },
    ]


async def test_a_session_that_fell_silent_has_no_status(alice: Api):
    session = await alice.session()
    alice.clock.now += 4000
    await alice.app.state.rooms.sessions.expire_silent(3600)
    (found,) = (await alice.post("sessions/search", {}))["sessions"]
    assert found["session_id"] == session
    assert "status" not in found
    assert await search(alice, statuses=[{"type": "active"}]) == []


async def test_pages_go_on_where_the_last_one_ended(alice: Api):
    alice.clock.now += 0.123456789
    # All at the same moment, so that only the id tells them apart.
    made = {await alice.session() for _ in range(7)}
    seen: list[str] = []
    cursor = None
    for _ in range(4):
        query = {"limit": 2} | ({"cursor": cursor} if cursor else {})
        page = await alice.post("sessions/search", query)
        seen += [one["session_id"] for one in page["sessions"]]
        cursor = page.get("next_cursor")
        if cursor is None:
            break
    assert len(seen) == 7
    assert set(seen) == made


async def test_the_last_page_has_no_cursor_even_when_it_is_full(alice: Api):
    for _ in range(2):
        await alice.session()
    assert "next_cursor" not in await alice.post("sessions/search", {"limit": 2})


async def test_a_page_is_filled_however_rare_its_sessions_are(
    alice: Api, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("server.tenancy.search._SCANNED_AT_ONCE", 3)
    wanted = []
    for number in range(20):
        alice.clock.now += 1
        session = await alice.session(user_metadata={"rare": str(number % 5 == 0)})
        if number % 5 == 0:
            wanted.insert(0, session)
    assert await search(alice, user_metadata={"rare": "True"}) == wanted


async def test_a_session_tells_what_it_holds(alice: Api):
    session = await alice.session(display_name="mine", user_metadata={"n": 1})
    run = await alice.run(session)
    await alice.save(run, "one")
    await alice.save(run, "two", ttl_seconds=3600)
    (found,) = (await alice.post("sessions/search", {}))["sessions"]
    assert found["checkpoint_storage_bytes"] > 0
    del found["checkpoint_storage_bytes"]
    assert found == {
        "session_id": session,
        "created_at": "2023-11-15T12:00:00Z",
        "owner": URN,
        "project_id": "default",
        "checkpoints_count": 2,
        "display_name": "mine",
        "user_metadata": {"n": "1"},
        "status": {"type": "active"},
    }
    alice.clock.now += 3600
    (found,) = (await alice.post("sessions/search", {}))["sessions"]
    assert found["checkpoints_count"] == 1


async def test_nobody_finds_another_tenants_session(alice: Api, bob: Api):
    session = await alice.session()
    assert await search(bob) == []
    assert await search(bob, session_id=session) == []
    assert await search(bob, owner={"type": "user", "owner_urns": [URN]}) == []
    cursor = {"last_created_at": "2030-01-01T00:00:00Z", "last_session_id": session}
    assert await search(bob, cursor=cursor) == []


@pytest.mark.parametrize(
    ("query", "words"),
    [
        ({"limit": 0}, "limit"),
        ({"limit": 201}, "limit"),
        ({"display_name": ""}, "display_name"),
        ({"statuses": []}, "statuses"),
        ({"statuses": [{"type": "asleep"}]}, "asleep"),
        ({"owner": {"type": "user"}}, "owner.owner_urns"),
        ({"owner": {"type": "user", "owner_urns": ["x"] * 11}}, "owner_urns"),
        ({"cursor": {"last_created_at": "now", "last_session_id": "s"}}, "'now'"),
        ({"cursor": {"last_created_at": "2023-11-15T12:00:00", "last_session_id": "s"}}, "zone"),
    ],
)
async def test_a_query_that_makes_no_sense_is_refused(
    alice: Api, query: dict[str, Any], words: str
):
    assert words in (await alice.post("sessions/search", query, 400))["detail"]
