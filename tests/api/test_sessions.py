"""Sessions over HTTP."""

from __future__ import annotations

from server.housekeeping import Housekeeping
from tests import bodies
from tests.api.client import Client
from tests.databases import Clock


async def test_one_request_sent_twice_makes_one_session(client: Client):
    headers = {"x-idempotency-key": "once"}
    first, second = [
        (await client.post("create_session", json={}, headers=headers)).json() for _ in range(2)
    ]
    assert first == second
    assert (await client.post("create_session", json={})).json() != first


async def test_a_session_knows_what_was_made_in_it(client: Client):
    session = await client.session(user_metadata={"n": 1}, display_name="mine")
    run = await client.run(session)
    sampler = await client.sampler(session)
    answer = (await client.get(f"sessions/{session}")).json()
    assert answer["training_run_ids"] == [run]
    assert answer["sampler_ids"] == [sampler]
    assert answer["user_metadata"] == {"n": "1"}
    assert answer["display_name"] == "mine"


async def test_sessions_are_listed_newest_first_in_pages(client: Client, clock: Clock):
    made = []
    for _ in range(5):
        clock.now += 1
        made.append(await client.session())
    pages = [
        (await client.get("sessions", params={"limit": 2, "offset": offset})).json()["sessions"]
        for offset in (0, 2, 4)
    ]
    assert [session for page in pages for session in page] == made[::-1]


async def test_after_its_finish_nothing_more_is_taken(client: Client):
    session = await client.session()
    run, sampler = await client.run(session), await client.sampler(session)
    promise = await client.train(run, 1, [1])
    for reason in ("success", "errored"):
        response = await client.ask(f"sessions/{session}/finish", reason={"type": reason})
        assert response.status_code == 200

    for route, body in (
        ("session_heartbeat", {"session_id": session}),
        ("optim_step", bodies.optim_step(run, 2)),
        ("forward_backward", bodies.forward_backward(run, 2, [1])),
        ("asample", bodies.sample(sampler, 0, [1])),
        (
            "create_model",
            {"session_id": session, "model_seq_id": 1, "base_model": "tiny/fake"},
        ),
        (
            "create_sampling_session",
            {"session_id": session, "sampling_session_seq_id": 1, "base_model": "tiny/fake"},
        ),
    ):
        response = await client.ask(route, **body)
        assert (response.status_code, response.headers["x-should-retry"]) == (410, "false"), route
        assert "finished" in response.json()["detail"]
    assert (await client.result(promise)).status_code == 200, "what was promised is kept"


async def test_a_silent_client_that_comes_back_finds_everything(client: Client, clock: Clock):
    session = await client.session()
    run = await client.run(session)
    clock.now += 4000
    await Housekeeping(client.rooms).sweep()
    assert (await client.rooms.sessions.get(_me(), session)).status == "expired"

    assert (await client.result(await client.train(run, 1, [1]))).status_code == 200
    assert (await client.rooms.sessions.get(_me(), session)).status == "active"
    assert await client.answer("session_heartbeat", session_id=session)


async def test_a_session_keeps_alive_by_its_heartbeats(client: Client, clock: Clock):
    session = await client.session()
    for _ in range(3):
        clock.now += 3000
        await client.answer("session_heartbeat", session_id=session)
        await Housekeeping(client.rooms).sweep()
    assert (await client.rooms.sessions.get(_me(), session)).status == "active"


async def test_a_session_moves_to_another_project(client: Client):
    session = await client.session()
    response = await client.put(f"sessions/{session}/project", json={"project_id": "other"})
    assert response.status_code == 200
    assert (await client.rooms.sessions.get(_me(), session)).project == "other"


def _me():
    from server.tenancy.keys import LOCAL

    return LOCAL
