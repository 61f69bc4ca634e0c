"""Servers of somebody else are used when they serve the same model."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from backends.contract import BackendError
from backends.sampling.vllm.client import ReplicaClient
from backends.sampling.vllm.model_facts import ModelFacts
from backends.sampling.vllm.remote import RemoteServer
from tests.unit.vllm.fake_server import FakeServer, serving
from tests.unit.vllm.test_vllm_retries import NoText

FACTS = ModelFacts(vocab_size=10, max_context_length=20, decoder=NoText())


@pytest.fixture
def fake() -> FakeServer:
    return FakeServer()


@pytest_asyncio.fixture
async def url(fake: FakeServer) -> AsyncIterator[str]:
    async with serving(fake) as url:
        yield url


async def refusal(url: str) -> str:
    with pytest.raises(BackendError) as raised:
        await RemoteServer.find(url, FACTS)
    return str(raised.value)


async def test_the_same_model_is_found(fake: FakeServer, url: str):
    fake.vocab_size, fake.max_model_len = FACTS.vocab_size, FACTS.max_context_length
    server = await RemoteServer.find(url, FACTS)
    assert server.url == url
    await server.stop()


async def test_another_vocabulary_is_another_model(fake: FakeServer, url: str):
    fake.vocab_size = FACTS.vocab_size - 1
    assert "does not take token 9" in await refusal(url)


async def test_a_shorter_context_is_refused(fake: FakeServer, url: str):
    fake.max_model_len = FACTS.max_context_length - 1
    assert "takes 19 tokens" in await refusal(url)


async def test_a_model_by_another_name_is_not_found(fake: FakeServer, url: str):
    fake.served_name = "org/name"
    assert "serves org/name: start it with --served-model-name base" in await refusal(url)


async def test_what_is_no_vllm_is_said(fake: FakeServer, url: str):
    fake.served_name = "<html>"
    assert "answers what is no vLLM's" in await refusal(url)


async def test_nobody_there_is_said(url: str):
    assert "no vLLM answers" in await refusal("http://127.0.0.1:1")


@pytest.mark.parametrize(("late", "healthy"), [(0, True), (2, True), (3, False)])
async def test_a_server_is_given_up_when_it_is_late_again_and_again(
    fake: FakeServer, url: str, monkeypatch: pytest.MonkeyPatch, late: int, healthy: bool
):
    monkeypatch.setattr("backends.sampling.vllm.client._HEALTH_S", 0.5)
    client = ReplicaClient(url)
    fake.late_health_answers = late
    assert await client.healthy() == healthy
    assert fake.late_health_answers == 0
    await client.close()
    fake.over.set()


async def test_a_server_that_is_gone_is_given_up_at_once(fake: FakeServer):
    async with serving(fake) as url:
        server = await RemoteServer.find(url, FACTS)
    assert "not healthy any more" in await server.wait_gone()
    await server.stop()
