"""Maintenance: what comes is accepted and waits, nothing new begins, and nothing fails."""

from __future__ import annotations

import asyncio

import httpx2
import pytest
from fastapi import FastAPI

from tests import bodies
from tests.api.client import Client
from tests.fake_backend import FakeBackend

WAITING = {"queue_state": "paused_capacity", "queue_state_reason": "maintenance"}


@pytest.fixture
def operator(app: FastAPI, client: Client) -> httpx2.AsyncClient:
    return operator_of(app)


def operator_of(app: FastAPI) -> httpx2.AsyncClient:
    """Speaks to the service that `client` brought up."""
    return httpx2.AsyncClient(
        transport=httpx2.ASGITransport(app),
        base_url="http://hearth/operator",
        headers={"authorization": f"Bearer {app.state.rooms.operator_token}"},
    )


async def told(client: Client, promise: dict) -> dict:
    """What a client that waits is told."""
    response = await client.ask("retrieve_future", request_id=promise["request_id"])
    assert response.status_code == 408
    return {key: response.json().get(key) for key in WAITING}


async def test_what_comes_meanwhile_begins_afterwards(
    client: Client, operator: httpx2.AsyncClient, backend: FakeBackend
):
    session = await client.session()
    run, sampler = await client.run(session), await client.sampler(session)
    await operator.post("maintenance/on")
    promises = [
        await client.train(run, 1, [1, 2]),
        await client.answer("asample", **bodies.sample(sampler, 0, [1])),
    ]
    assert [await told(client, promise) for promise in promises] == [WAITING, WAITING]
    assert (backend.passes, backend.sampled) == ([], [])
    assert (await operator.post("maintenance/off")).json() == {"on": False}
    for promise in promises:
        assert (await client.result(promise)).status_code == 200


async def test_runs_can_be_created_meanwhile(client: Client, operator: httpx2.AsyncClient):
    await operator.post("maintenance/on")
    creating = asyncio.create_task(client.run())
    await asyncio.sleep(0.1)
    assert not creating.done()
    await operator.post("maintenance/off")
    assert await creating


async def test_what_is_under_way_is_finished(
    client: Client, operator: httpx2.AsyncClient, backend: FakeBackend
):
    session = await client.session()
    run, sampler = await client.run(session), await client.sampler(session)
    backend.hold()
    promises = [
        await client.train(run, 1, [1, 2]),
        await client.answer("asample", **bodies.sample(sampler, 0, [1])),
    ]
    await told(client, promises[0])  # both have begun by then
    await operator.post("maintenance/on")
    backend.let_go()
    for promise in promises:
        assert (await client.result(promise)).status_code == 200


async def test_a_sample_that_waits_can_be_cancelled(
    client: Client, operator: httpx2.AsyncClient, backend: FakeBackend
):
    sampler = await client.sampler(await client.session())
    await operator.post("maintenance/on")
    promise = await client.answer("asample", **bodies.sample(sampler, 0, [1]))
    await client.answer("cancel_future", request_id=promise["request_id"])
    assert "cancelled" in (await client.result(promise)).json()["error"]
    assert backend.sampled == []


async def test_whoever_waits_already_is_told_at_once(
    client: Client, operator: httpx2.AsyncClient, backend: FakeBackend
):
    sampler = await client.sampler(await client.session())
    backend.hold()
    promise = await client.answer("asample", **bodies.sample(sampler, 0, [1]))
    client.rooms.settings = client.rooms.settings.model_copy(update={"long_poll_s": 40})
    polling = asyncio.create_task(told(client, promise))
    await asyncio.sleep(0.1)
    await operator.post("maintenance/on")
    async with asyncio.timeout(20):
        assert await polling == WAITING


async def test_no_other_switch_is_known(operator: httpx2.AsyncClient):
    assert (await operator.post("maintenance/maybe")).status_code == 400
    assert (await operator.get("maintenance")).json() == {"on": False}
