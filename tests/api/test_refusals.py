"""Every refusal has a body that says what is wrong, a category, and whether to try again."""

from __future__ import annotations

import asyncio
import gzip
import sqlite3
from collections.abc import AsyncGenerator
from typing import Any

import httpx2
import pytest
import zstandard
from sqlalchemy.exc import OperationalError

from server.settings import Settings
from tests import bodies
from tests.api.client import Client

TRAIN = "forward_backward"


def told(response: httpx2.Response) -> tuple[int, str, str]:
    """Its status, category and x-should-retry; it has one sentence for people."""
    body = response.json()
    assert body["detail"]
    return response.status_code, body["category"], response.headers["x-should-retry"]


async def test_400_names_the_field_the_value_and_the_limit(client: Client):
    run = await client.run()
    response = await client.ask("optim_step", model_id=run, seq_id=0)
    assert told(response) == (400, "user", "false")
    assert response.json()["detail"].startswith("seq_id: ")
    assert "got 0" in response.json()["detail"]


async def test_400_not_422_for_a_query_that_is_wrong(client: Client):
    response = await client.get("training_runs", params={"limit": "many"})
    assert told(response) == (400, "user", "false")
    assert response.json()["detail"].startswith("query.limit: ")


@pytest.mark.parametrize("offset", [-1, 2**63, 10**30])
async def test_400_for_an_offset_no_database_has(client: Client, offset: int):
    for route in ("training_runs", "sessions", "checkpoints"):
        response = await client.get(route, params={"offset": offset})
        assert told(response) == (400, "user", "false")


async def test_400_for_a_body_that_is_not_json(client: Client):
    response = await client.post("create_session", content=b"{")
    assert told(response) == (400, "user", "false")
    assert "not JSON" in response.json()["detail"]


async def test_400_for_a_model_that_is_not_here_says_which_are(client: Client):
    session = await client.session()
    response = await client.ask(
        "create_model", session_id=session, model_seq_id=0, base_model="other/model"
    )
    assert told(response) == (400, "user", "false")
    assert "tiny/fake" in response.json()["detail"]


async def test_401_without_a_key_once_there_is_one(client: Client):
    key = await client.rooms.keys.create("me", "me", "default")
    assert told(await client.ask("create_session")) == (401, "user", "false")
    wrong = await client.post("create_session", json={}, headers={"x-api-key": "tml-wrong"})
    assert told(wrong) == (401, "user", "false")
    right = await client.post("create_session", json={}, headers={"x-api-key": key})
    assert right.status_code == 200

    await client.rooms.keys.revoke("me")
    revoked = await client.post("create_session", json={}, headers={"x-api-key": key})
    assert told(revoked) == (401, "user", "false")


async def test_404_for_what_does_not_exist(client: Client):
    for route, body in (
        ("retrieve_future", {"request_id": "nothing"}),
        ("get_info", {"model_id": "nothing"}),
        ("optim_step", {"model_id": "nothing", "seq_id": 1}),
        ("session_heartbeat", {"session_id": "nothing"}),
        ("join_sampling_session", {"sampling_session_id": "nothing"}),
        ("cancel_future", {"request_id": "nothing"}),
        ("weights_info", {"tinker_path": "tinker://nothing/weights/a"}),
        (TRAIN, bodies.forward_backward("nothing", 1, [1])),
        ("asample", bodies.sample("nothing", 0, [1])),
        ("no_such_route", {}),
    ):
        assert told(await client.ask(route, **body)) == (404, "user", "false"), route


async def test_405_for_the_wrong_method(client: Client):
    assert told(await client.get("create_session")) == (405, "user", "false")


async def test_408_with_the_queue_state_after_the_hold(client: Client, backend: Any):
    run = await client.run()
    backend.hold()
    promise = await client.train(run, 1, [1])
    loop = asyncio.get_running_loop()
    started = loop.time()
    response = await client.ask("retrieve_future", request_id=promise["request_id"])

    assert response.status_code == 408
    assert loop.time() - started >= 0.05
    assert response.json() == {
        "type": "try_again",
        "request_id": promise["request_id"],
        "queue_state": "active",
    }
    assert response.headers["x-should-retry"] == "false"
    backend.let_go()
    assert (await client.result(promise)).status_code == 200


async def test_408_while_a_run_is_restored_says_so(client: Client, backend: Any):
    run = await client.run()
    backend.kill()
    backend.hold()
    promise = await client.train(run, 1, [1])
    await asyncio.sleep(0.02)
    answer = (await client.ask("retrieve_future", request_id=promise["request_id"])).json()
    assert (answer["queue_state"], answer["queue_state_reason"]) == (
        "paused_capacity",
        "restoring",
    )
    backend.let_go()


async def test_429_when_too_much_training_data_waits_says_when_to_come_back(
    client: Client, backend: Any, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(client.rooms.runs, "_max_pass_bytes", 100)
    run = await client.run()
    backend.hold()
    first = await client.train(run, 1, [1])
    refused = await client.ask(TRAIN, **bodies.forward_backward(run, 2, [1]))
    assert told(refused) == (429, "user", "true")
    assert int(refused.headers["retry-after"]) <= 60, "the SDK takes no longer one"
    backend.let_go()
    assert (await client.result(first)).status_code == 200
    assert (await client.result(await client.train(run, 2, [1]))).status_code == 200


async def test_410_for_an_expired_result(client: Client, clock: Any):
    run = await client.run()
    promise = await client.train(run, 1, [1])
    await client.result(promise)
    clock.now += 90_000
    from server.housekeeping import Housekeeping

    await Housekeeping(client.rooms).sweep()
    client.rooms.ledger._recent = type(client.rooms.ledger._recent)(0)
    response = await client.ask("retrieve_future", request_id=promise["request_id"])
    assert told(response) == (410, "user", "false")


async def test_413_before_more_than_the_limit_is_read(client: Client):
    for content, headers in (
        (b" " * (2**20 + 1), {}),
        (zstandard.compress(b" " * (2**20 + 1)), {"content-encoding": "zstd"}),
        (gzip.compress(b" " * (2**20 + 1)), {"content-encoding": "gzip"}),
    ):
        response = await client.post("create_session", content=content, headers=headers)
        assert told(response) == (413, "user", "false")


async def stalling(seconds: float) -> AsyncGenerator[bytes]:
    yield b"{"
    await asyncio.sleep(seconds)
    yield b"}"


async def test_408_when_a_body_stands_still(client: Client, settings: Settings):
    client.rooms.settings = settings.model_copy(update={"body_timeout_s": 0.05})
    for route in ("create_session", "telemetry"):
        response = await client.post(route, content=stalling(10))
        assert told(response) == (408, "user", "true")
        assert response.headers["connection"] == "close"
        assert "0.05 seconds" in response.json()["detail"]


async def test_a_body_that_pauses_for_less_is_read(client: Client):
    assert (await client.post("client/config", content=stalling(0.1))).status_code == 200


async def test_413_before_anything_that_is_announced_too_large_is_read(client: Client):
    headers = {"content-length": str(2**20 + 1)}
    response = await client.post("create_session", content=stalling(10), headers=headers)
    assert told(response) == (413, "user", "false")


async def test_an_unknown_address_is_named(client: Client):
    for method, path, status in (("GET", "nowhere", 404), ("PUT", "asample", 405)):
        response = await client.request(method, path)
        assert told(response) == (status, "user", "false")
        assert f"{method} /api/v1/{path}: " in response.json()["detail"]


@pytest.mark.parametrize("size", [10, 600_000])
async def test_a_compressed_body_is_read(client: Client, size: int):
    body = b'{"tags": [], "display_name": "%s"}' % (b"x" * size)
    response = await client.post(
        "create_session",
        content=zstandard.compress(body),
        headers={"content-encoding": "zstd"},
    )
    assert response.status_code == 200


async def test_429_when_too_many_samples_wait(client: Client, backend: Any):
    session = await client.session()
    sampler = await client.sampler(session)
    backend.hold()
    promises = [await client.answer("asample", **bodies.sample(sampler, n, [1])) for n in range(3)]
    response = await client.ask("asample", **bodies.sample(sampler, 3, [1]))
    assert told(response) == (429, "user", "true")

    backend.let_go()
    for promise in promises:
        assert (await client.result(promise)).status_code == 200
    assert (await client.ask("asample", **bodies.sample(sampler, 3, [1]))).status_code == 200


async def test_500_says_nothing_of_the_inside(client: Client, monkeypatch: pytest.MonkeyPatch):
    async def fail(*_: Any) -> None:
        raise ZeroDivisionError("secret")

    monkeypatch.setattr(client.rooms.sessions, "create", fail)
    response = await client.ask("create_session")
    assert told(response) == (500, "server", "false")
    assert "secret" not in response.text


async def test_503_while_the_database_is_away(client: Client, monkeypatch: pytest.MonkeyPatch):
    async def fail(*_: Any) -> None:
        raise OperationalError("SELECT secret", {}, sqlite3.OperationalError("disk I/O error"))

    monkeypatch.setattr(client.rooms.sessions, "create", fail)
    response = await client.ask("create_session")
    assert told(response) == (503, "server", "true")
    assert "secret" not in response.text


async def test_503_on_the_way_out_but_promises_can_still_be_asked_for(client: Client, backend: Any):
    run = await client.run()
    backend.hold()
    promise = await client.train(run, 1, [1])
    waiting = asyncio.create_task(client.ask("retrieve_future", request_id=promise["request_id"]))
    await asyncio.sleep(0.01)
    client.rooms.drain()

    answer = (await waiting).json()
    assert (answer["queue_state"], answer["queue_state_reason"]) == (
        "paused_capacity",
        "the server is restarting",
    )
    for route, body in (
        ("create_session", {}),
        ("create_model", {}),
        ("create_sampling_session", {}),
        ("asample", {}),
        ("optim_step", {}),
        (TRAIN, {}),
        ("load_weights", {}),
    ):
        assert told(await client.ask(route, **body)) == (503, "server", "true"), route
    backend.let_go()


async def test_a_content_that_cannot_be_computed_is_a_failed_future(client: Client):
    """That is how the SDK tells its user; the next number goes on."""
    run = await client.run()
    promise = await client.train(run, 1, [1000])
    response = await client.result(promise)
    assert response.status_code == 200
    assert response.json()["category"] == "user"
    assert "1000" in response.json()["error"]
    assert (await client.result(await client.train(run, 2, [1]))).status_code == 200
