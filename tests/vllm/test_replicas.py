"""Two replicas: work is shared, and the loss of one goes unnoticed."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Sequence
from pathlib import Path

import pytest
import pytest_asyncio

from backends.contract import SampleDelta, SampleRequest, SampleResult
from backends.sampling.embedded import EmbeddedEngine
from backends.sampling.vllm.engine import VllmEngine
from backends.sampling.vllm.process import LocalServer
from backends.sampling.vllm.replica import Replica
from tests.unit.sampling.material import outcomes
from tests.unit.sampling.material import result as embedded_result
from tests.vllm.material import prompt, request, settings, started_engine, until

pytestmark = pytest.mark.asyncio(loop_scope="session")


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def pair(
    base_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[VllmEngine]:
    launch = settings(base_path, max_loras=2, max_cpu_loras=3)
    engine = await started_engine(launch, tmp_path_factory.mktemp("pair"), replicas=2, capacity=3)
    yield engine
    await engine.fleet.stop()


async def generated(replica: Replica) -> int:
    return (await replica.client.metrics()).generated_tokens


def kill(replica: Replica) -> None:
    assert isinstance(replica._host, LocalServer)
    os.killpg(replica._host.pid, signal.SIGKILL)


def of_their_own_adapters(
    found: Sequence[object], embedded: EmbeddedEngine, requests: Sequence[SampleRequest]
) -> None:
    expected = outcomes(embedded, *requests)
    for one, got in zip(requests, found, strict=True):
        assert isinstance(got, SampleResult), got
        own = expected[one.request_id]
        assert isinstance(own, SampleResult)
        assert got.sequences[0].tokens.tolist() == own.sequences[0].tokens.tolist()


async def test_both_share_the_work_of_more_adapters_than_they_have_slots_for(
    pair: VllmEngine, embedded: EmbeddedEngine, adapters: list[str]
):
    before = [await generated(replica) for replica in pair.fleet.replicas]
    requests = [
        request(f"{i}:{j}", prompt(10 + j, seed=i), adapter=adapter, max_tokens=20)
        for i, adapter in enumerate(adapters)
        for j in range(2)
    ]
    found = await asyncio.gather(*(pair.sample(one) for one in requests))
    of_their_own_adapters(found, embedded, requests)
    for replica, count in zip(pair.fleet.replicas, before, strict=True):
        assert await generated(replica) > count


async def test_of_many_samples_none_is_lost_or_of_another_adapter_when_a_replica_is_killed(
    pair: VllmEngine, embedded: EmbeddedEngine, adapters: list[str]
):
    """There are more adapters than both have slots for, so some are being loaded meanwhile."""
    victim = pair.fleet.replicas[0]
    requests = [
        request(f"r{i}", prompt(10, seed=i), adapter=adapters[i % len(adapters)], max_tokens=60)
        for i in range(60)
    ]
    running = [asyncio.create_task(pair.sample(one)) for one in requests]
    await until(lambda: sum(task.done() for task in running) >= 5 and victim.load > 0)
    kill(victim)
    of_their_own_adapters(await asyncio.gather(*running), embedded, requests)
    assert victim.lost_requests > 0
    await until(lambda: victim.generation == 2)


async def test_a_replica_killed_in_the_middle_is_not_noticed_and_comes_back(
    pair: VllmEngine, adapters: list[str]
):
    victim = pair.fleet.replicas[1]
    fields = {"max_tokens": 400, "temperature": 1.0}
    requests = [
        request(f"r{i}", prompt(10, seed=i), adapter=adapters[i % 3], seed=i, **fields)
        for i in range(10)
    ]
    running = [asyncio.create_task(pair.sample(one)) for one in requests]
    streamed: list[SampleDelta | SampleResult] = []

    async def read() -> None:
        async for part in pair.stream(request("s", prompt(9), num_samples=2, **fields)):
            assert isinstance(part, SampleDelta | SampleResult)
            streamed.append(part)

    reading = asyncio.create_task(read())
    await until(lambda: len(streamed) >= 4 and victim.load > 0)
    kill(victim)
    found = await asyncio.gather(*running)
    await reading
    for one, got in zip(requests, found, strict=True):
        assert isinstance(got, SampleResult), got
        assert len(got.sequences[0].tokens) == one.max_tokens
    is_its_own_result(streamed)
    # Seeds give the same samples wherever they are drawn.
    again = await pair.sample(requests[0])
    assert isinstance(again, SampleResult)
    assert isinstance(found[0], SampleResult)
    assert again.sequences[0].tokens.tolist() == found[0].sequences[0].tokens.tolist()
    await until(lambda: victim.generation == 2)
    before = await generated(victim)
    # The adapters are all with the other one now; the base model is everywhere.
    plain = [request(f"p{i}", prompt(10, seed=i)) for i in range(4)]
    await asyncio.gather(*(pair.sample(one) for one in plain))
    assert await generated(victim) > before


def is_its_own_result(streamed: Sequence[SampleDelta | SampleResult]) -> None:
    last = streamed[-1]
    assert isinstance(last, SampleResult)
    for index, sequence in enumerate(last.sequences):
        deltas = [d for d in streamed if isinstance(d, SampleDelta) and d.index == index]
        tokens = [token for delta in deltas for token in delta.tokens.tolist()]
        assert tokens == sequence.tokens.tolist()


async def test_with_no_replica_left_requests_wait_for_the_next(
    pair: VllmEngine, embedded: EmbeddedEngine, adapters: list[str]
):
    for replica in pair.fleet.replicas:
        kill(replica)
    await until(lambda: not any(replica.ready for replica in pair.fleet.replicas))
    one = request("r", prompt(10), adapter=adapters[0])
    got = await pair.sample(one)
    assert isinstance(got, SampleResult)
    expected = embedded_result(embedded, one).sequences[0].tokens.tolist()
    assert got.sequences[0].tokens.tolist() == expected
