"""Samples of many tenants before one engine. Design 1.5: nobody starves."""

from __future__ import annotations

import asyncio

import pytest
from fastapi import FastAPI

from server.settings import Settings
from tests import bodies
from tests.api.client import Client
from tests.fake_backend import FakeBackend

ROOM = 4


@pytest.fixture
def settings(settings: Settings) -> Settings:
    return settings.model_copy(update={"max_waiting_samples": 600, "max_running_samples": ROOM})


async def tenant(app: FastAPI, name: str) -> Client:
    key = await app.state.rooms.keys.create(name, name, "default")
    return Client(app, **{"x-api-key": key})


async def asked(client: Client, sampler: str, count: int) -> list[dict]:
    return [await client.answer("asample", **bodies.sample(sampler, i, [1])) for i in range(count)]


async def test_one_sample_of_another_tenant_is_among_the_next_few(
    client: Client, app: FastAPI, backend: FakeBackend
):
    many, few = await tenant(app, "many"), await tenant(app, "few")
    samplers = [await one.sampler(await one.session()) for one in (many, few)]
    backend.hold()
    flood = await asked(many, samplers[0], 500)
    (single,) = await asked(few, samplers[1], 1)
    backend.let_go()
    assert (await few.result(single)).status_code == 200
    place = [one.request_id for one in backend.sampled].index(single["request_id"])
    assert place <= ROOM
    for promise in flood:
        assert (await many.result(promise)).status_code == 200
    assert len(backend.sampled) == 501


async def test_those_that_wait_for_their_turn_are_active_and_can_be_cancelled(
    client: Client, backend: FakeBackend
):
    sampler = await client.sampler(await client.session())
    backend.hold()
    promises = await asked(client, sampler, ROOM + 2)
    waiting = promises[-1]["request_id"]
    told = await client.ask("retrieve_future", request_id=waiting)
    assert (told.status_code, told.json()["queue_state"]) == (408, "active")
    assert await client.answer("cancel_future", request_id=waiting) == {}
    assert (await client.result(promises[-1])).json() == {
        "error": "cancelled by the client",
        "category": "user",
    }
    backend.let_go()
    await asyncio.gather(*(client.result(promise) for promise in promises))
    generated = {one.request_id for one in backend.sampled}
    assert generated == {promise["request_id"] for promise in promises[:-1]}
