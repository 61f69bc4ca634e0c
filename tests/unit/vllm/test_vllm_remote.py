"""Servers of somebody else are used when they serve the same model."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from backends.contract import BackendError
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
