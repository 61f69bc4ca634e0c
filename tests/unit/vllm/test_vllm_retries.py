"""What becomes of requests whose replica fails them. Real replicas die in tests/vllm."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack

import numpy as np
import pytest
import pytest_asyncio

from backends.contract import BackendError, SampleRequest, SampleResult
from backends.sampling.vllm.adapters import adapter_name
from backends.sampling.vllm.engine import VllmEngine
from backends.sampling.vllm.fleet import Fleet
from backends.sampling.vllm.model_facts import ModelFacts
from backends.sampling.vllm.remote import RemoteServer
from backends.sampling.vllm.replica import Replica
from backends.sampling.vllm.routing import ReplicaView, RoutedRequest
from backends.sampling.vllm.translate import Limits
from tests.unit.vllm.fake_server import FakeServer, serving


class NoText:
    def decode(self, token_ids, *, skip_special_tokens, clean_up_tokenization_spaces):
        raise AssertionError("nobody asked for text")


def _first(replicas: Sequence[ReplicaView], request: RoutedRequest) -> str:
    return replicas[0].name


@pytest_asyncio.fixture
async def fakes() -> list[FakeServer]:
    return [FakeServer(), FakeServer()]


@pytest_asyncio.fixture
async def engine(fakes: list[FakeServer]) -> AsyncIterator[VllmEngine]:
    async with AsyncExitStack() as stack:
        urls = [await stack.enter_async_context(serving(fake)) for fake in fakes]
        facts = ModelFacts(vocab_size=10, max_context_length=20, decoder=NoText())
        replicas = [
            Replica(
                f"replica-{i}", lambda url=url: RemoteServer.find(url, facts), adapter_capacity=2
            )
            for i, url in enumerate(urls)
        ]
        fleet = Fleet(replicas, _first)
        await fleet.start()
        for fake in fakes:
            fake.log.clear()
        yield VllmEngine(fleet, facts, Limits(max_num_seqs=4, max_logprobs=20))
        await fleet.stop()


def request(adapter: str | None = None) -> SampleRequest:
    return SampleRequest(
        request_id="r", prompt=np.arange(4), num_samples=2, max_tokens=3, adapter=adapter
    )


async def test_a_dead_engine_s_request_goes_to_the_other_replica(
    engine: VllmEngine, fakes: list[FakeServer]
):
    fakes[0].broken = [500]
    got = await engine.sample(request())
    assert isinstance(got, SampleResult)
    assert [s.tokens.tolist() for s in got.sequences] == [[7, 7, 7]] * 2
    assert [len(fake.log) for fake in fakes] == [1, 1]


async def test_a_request_that_two_replicas_fail_is_not_tried_a_third_time(
    engine: VllmEngine, fakes: list[FakeServer]
):
    for fake in fakes:
        fake.broken = [500, 500]
    with pytest.raises(BackendError, match="lost twice"):
        await engine.sample(request())
    assert [len(fake.log) for fake in fakes] == [1, 1]
    assert [replica.load for replica in engine.fleet.replicas] == [0, 0]


async def test_an_adapter_that_is_not_there_any_more_is_loaded_again(
    engine: VllmEngine, fakes: list[FakeServer]
):
    await engine.sample(request("x"))
    fakes[0].loaded.clear()
    assert isinstance(await engine.sample(request("x")), SampleResult)
    name = adapter_name("x")
    once = [("load", "x"), ("generate", name)]
    assert fakes[0].log == [*once, ("generate", name), *once]
    assert fakes[1].log == []
