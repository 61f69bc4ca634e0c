"""Calls to a server that stops answering. What real servers answer is in tests/vllm."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio
from aiohttp import web
from aiohttp.test_utils import TestServer

from backends.sampling.vllm.client import ReplicaClient
from backends.sampling.vllm.errors import ReplicaLost

EVENT = b'data: {"choices": [{"index": 0, "token_ids": [7]}]}\n\n'


@pytest_asyncio.fixture
async def client() -> AsyncIterator[ReplicaClient]:
    """Of a server whose answers never end; streams have one event before that."""
    over = asyncio.Event()

    async def generate(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse()
        if (await request.json()).get("stream"):
            await response.prepare(request)
            await response.write(EVENT)
        await over.wait()
        return response

    app = web.Application()
    app.router.add_post("/inference/v1/generate", generate)
    async with TestServer(app) as server:
        client = ReplicaClient(f"http://127.0.0.1:{server.port}")
        yield client
        await client.close()
        over.set()


async def test_a_stream_under_way_ends_when_its_client_is_closed(client: ReplicaClient):
    begun = asyncio.Event()

    async def read() -> None:
        async for _ in client.stream({}):
            begun.set()

    reading = asyncio.create_task(read())
    await begun.wait()
    await client.close()
    with pytest.raises(ReplicaLost):
        await reading


async def test_a_call_under_way_ends_when_its_client_is_closed(client: ReplicaClient):
    calling = asyncio.create_task(client.generate({}))
    await asyncio.sleep(0.05)
    await client.close()
    with pytest.raises(ReplicaLost):
        await calling


async def test_a_call_that_comes_after_the_end_finds_the_replica_lost():
    client = ReplicaClient("http://127.0.0.1:9")
    await client.close()
    with pytest.raises(ReplicaLost, match="was given up"):
        await client.unload_adapter("name")
