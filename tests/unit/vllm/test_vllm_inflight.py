"""What a replica is told when weights are replaced under its requests."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

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
from backends.sampling.vllm.routing import choose
from backends.sampling.vllm.translate import Limits
from tests.unit.vllm.fake_server import FakeServer, serving
from tests.unit.vllm.test_vllm_retries import NoText

OLD, NEW = "old", "new"


@pytest_asyncio.fixture
async def fake() -> FakeServer:
    return FakeServer()


@pytest_asyncio.fixture
async def engine(fake: FakeServer) -> AsyncIterator[VllmEngine]:
    async with serving(fake) as url:
        facts = ModelFacts(vocab_size=10, max_context_length=20, decoder=NoText())
        replica = Replica("replica", lambda: RemoteServer.find(url, facts), adapter_capacity=4)
        fleet = Fleet([replica], choose)
        await fleet.start()
        fake.log.clear()
        yield VllmEngine(fleet, facts, Limits(max_num_seqs=4, max_logprobs=20))
        await fleet.stop()


def request(adapter: str, name: str = "r") -> SampleRequest:
    return SampleRequest(
        request_id=name, prompt=np.arange(4), num_samples=1, max_tokens=3, adapter=adapter
    )


async def logged(fake: FakeServer, what: tuple[str, object]) -> None:
    while what not in fake.log:  # noqa: ASYNC110 - the fake tells nobody
        await asyncio.sleep(0.001)


async def under_way(engine: VllmEngine, fake: FakeServer) -> asyncio.Task:
    fake.flowing.clear()
    task = asyncio.create_task(engine.sample(request(OLD)))
    await logged(fake, ("generate", adapter_name(OLD)))
    fake.log.clear()
    return task


async def test_weights_are_replaced_under_the_name_that_runs_and_new_requests_use_another(
    engine: VllmEngine, fake: FakeServer
):
    running = await under_way(engine, fake)
    await engine.update(OLD, NEW)
    assert fake.log[:3] == [("pause", "keep"), ("load", NEW), ("resume", None)]
    assert isinstance(await running, SampleResult)
    # That was the old name, which has served.
    await logged(fake, ("unload", NEW))
    await engine.sample(request(NEW))
    assert fake.log[-2:] == [("load", NEW), ("generate", adapter_name(NEW))]


async def test_one_that_comes_late_with_the_old_weights_is_given_the_new(
    engine: VllmEngine, fake: FakeServer
):
    running = await under_way(engine, fake)
    await engine.pause("replica", "keep")
    await engine.update(OLD, NEW)
    await engine.resume("replica")
    await asyncio.gather(running, engine.sample(request(OLD, "late")))
    assert ("generate", adapter_name(OLD)) not in fake.log
    assert ("generate", adapter_name(NEW)) in fake.log


async def test_nobody_is_held_up_where_nothing_runs_with_the_old_weights(
    engine: VllmEngine, fake: FakeServer
):
    await engine.sample(request(OLD))
    await engine.update(OLD, NEW)
    await logged(fake, ("unload", OLD))
    assert not {"pause", "resume"} & {what for what, _ in fake.log}


async def test_a_replica_that_an_operator_has_paused_stays_paused(
    engine: VllmEngine, fake: FakeServer
):
    running = await under_way(engine, fake)
    await engine.pause("replica", "keep")
    await engine.update(OLD, NEW)
    assert fake.log == [("pause", "keep"), ("load", NEW)]
    await engine.resume("replica")
    assert isinstance(await running, SampleResult)


async def test_a_resume_right_behind_a_pause_comes_after_it(engine: VllmEngine, fake: FakeServer):
    running = await under_way(engine, fake)
    fake.open.clear()
    pausing = asyncio.create_task(engine.pause("replica", "keep"))
    await logged(fake, ("pause", "keep"))
    resuming = asyncio.create_task(engine.resume("replica"))
    await asyncio.sleep(0.01)
    fake.open.set()
    await asyncio.gather(pausing, resuming)
    assert isinstance(await running, SampleResult)


async def test_weights_that_are_refused_leave_requests_as_they_were(
    engine: VllmEngine, fake: FakeServer
):
    running = await under_way(engine, fake)
    with pytest.raises(BackendError, match="LoRA rank 64"):
        await engine.update(OLD, "bad")
    assert fake.log == [("pause", "keep"), ("load", "bad"), ("resume", None)]
    assert fake.loaded == {adapter_name(OLD): OLD}
    assert isinstance(await running, SampleResult)


async def test_one_that_waits_for_a_replica_meanwhile_begins_with_the_newest(
    engine: VllmEngine, fake: FakeServer
):
    await engine.drain("replica")
    waiting = asyncio.create_task(engine.sample(request(OLD)))
    await asyncio.sleep(0.01)
    await engine.update(OLD, "newer")
    await engine.update("newer", NEW)
    await engine.resume("replica")
    assert isinstance(await waiting, SampleResult)
    assert [what for what in fake.log if what[0] == "load"] == [("load", NEW)]


async def test_one_that_is_ended_and_asked_again_begins_again_with_the_newest(
    engine: VllmEngine, fake: FakeServer
):
    running = await under_way(engine, fake)
    await engine.pause("replica", "abort")
    await engine.update(OLD, NEW)
    await engine.resume("replica")
    assert isinstance(await running, SampleResult)
    assert fake.log[-1] == ("generate", adapter_name(NEW))
