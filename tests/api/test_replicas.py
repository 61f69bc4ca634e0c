"""Sampling through replicas, and what their operator does to them. The vLLM servers are fake."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import AsyncExitStack
from dataclasses import replace

import httpx2
import pytest
import pytest_asyncio
from fastapi import FastAPI
from prometheus_client.parser import text_string_to_metric_families

from backends.sampling.vllm.engine import VllmEngine
from backends.sampling.vllm.fleet import Fleet
from backends.sampling.vllm.model_facts import ModelFacts
from backends.sampling.vllm.remote import RemoteServer
from backends.sampling.vllm.replica import Replica
from backends.sampling.vllm.routing import choose
from backends.sampling.vllm.translate import Limits
from server.app import Service
from server.settings import Settings
from tests import bodies
from tests.api.client import Client
from tests.api.test_maintenance import operator_of
from tests.databases import Clock
from tests.fake_backend import INFO, FakeBackend
from tests.unit.vllm.fake_server import FakeServer, serving
from tests.unit.vllm.test_vllm_retries import NoText

MODEL = "tiny/fake"
MAX_RANK = 16


@pytest.fixture
def fakes() -> list[FakeServer]:
    return [FakeServer(), FakeServer()]


@pytest.fixture
def settings(settings: Settings) -> Settings:
    changes = {
        "engine": "vllm",
        "engine_max_lora_rank": MAX_RANK,
        "max_waiting_samples": 30,
        "max_running_samples": 10,
    }
    return settings.model_copy(update=changes)


@pytest_asyncio.fixture
async def fleet(fakes: list[FakeServer]) -> AsyncGenerator[VllmEngine]:
    facts = ModelFacts(
        vocab_size=INFO.vocab_size, max_context_length=INFO.max_context_length, decoder=NoText()
    )
    async with AsyncExitStack() as stack:
        urls = [await stack.enter_async_context(serving(fake)) for fake in fakes]
        replicas = [
            Replica(
                f"replica-{i}", lambda url=url: RemoteServer.find(url, facts), adapter_capacity=2
            )
            for i, url in enumerate(urls)
        ]
        yield VllmEngine(Fleet(replicas, choose), facts, Limits(max_num_seqs=4, max_logprobs=20))


@pytest_asyncio.fixture
async def client(
    app: FastAPI,
    settings: Settings,
    clock: Clock,
    backend: FakeBackend,
    fleet: VllmEngine,
    fakes: list[FakeServer],
) -> AsyncGenerator[Client]:
    service = Service(settings, clock, {MODEL: [backend]}, {MODEL: fleet})
    await service.start()
    app.state.rooms = service.rooms
    for fake in fakes:
        fake.log.clear()
        fake.sessions.clear()
    async with Client(app) as client:
        yield client
    await service.stop()


@pytest.fixture
def operator(app: FastAPI, client: Client) -> httpx2.AsyncClient:
    return operator_of(app)


async def ask(client: Client, sampler: str, seq: int) -> dict:
    return await client.answer("asample", **bodies.sample(sampler, seq, [1]))


async def state(client: Client, promise: dict) -> tuple[str, str | None]:
    response = await client.ask("retrieve_future", request_id=promise["request_id"])
    assert response.status_code == 408
    return response.json()["queue_state"], response.json().get("queue_state_reason")


async def states(operator: httpx2.AsyncClient) -> list[str]:
    return [row["state"] for row in (await operator.get("replicas")).json()]


def generated(fakes: list[FakeServer]) -> list[int]:
    return [sum(what == "generate" for what, _ in fake.log) for fake in fakes]


async def test_every_replica_is_shown(
    client: Client, operator: httpx2.AsyncClient, fakes: list[FakeServer], backend: FakeBackend
):
    session = await client.session()
    path = await client.saved_for_sampler(await client.run(session), 1, "mine")
    sampler = await client.sampler(session, model_path=path)
    assert (await client.result(await ask(client, sampler, 0))).status_code == 200
    assert backend.sampled == []
    rows = (await operator.get("replicas")).json()
    assert [row["name"] for row in rows] == ["replica-0", "replica-1"]
    assert {(row["model"], row["state"], row["version"]) for row in rows} == {
        (MODEL, "ready", "0.0.fake")
    }
    assert [row["requests"] for row in rows] == generated(fakes)
    assert sorted(len(row["adapters"]) for row in rows) == [0, 1]
    assert {row["url"].rpartition(":")[0] for row in rows} == {"http://127.0.0.1"}


@pytest.mark.parametrize("command", ["pause", "drain"])
async def test_a_replica_that_is_taken_out_gets_nothing_until_it_is_resumed(
    client: Client, operator: httpx2.AsyncClient, fakes: list[FakeServer], command: str
):
    sampler = await client.sampler(await client.session())
    await client.result(await ask(client, sampler, 0))
    own = generated(fakes).index(1)  # a session stays where it is
    await operator.post(f"replicas/replica-{own}/{command}")
    for seq in range(1, 4):
        await client.result(await ask(client, sampler, seq))
    assert generated(fakes)[own] == 1
    wanted = ["ready", "ready"]
    wanted[own] = {"pause": "paused", "drain": "draining"}[command]
    assert await states(operator) == wanted
    await operator.post(f"replicas/replica-{own}/resume")
    await operator.post(f"replicas/replica-{1 - own}/pause")
    await client.result(await ask(client, sampler, 4))
    assert generated(fakes)[own] == 2


async def test_with_every_replica_paused_samples_wait_and_are_told_so(
    client: Client, operator: httpx2.AsyncClient, fakes: list[FakeServer]
):
    for name in ("replica-0", "replica-1"):
        assert (await operator.post(f"replicas/{name}/pause")).status_code == 200
    sampler = await client.sampler(await client.session())
    # Some of them are with the engine, the others wait for their turn before it.
    promises = [await ask(client, sampler, seq) for seq in range(20)]
    waiting = ("paused_capacity", "the sampling replicas are paused")
    assert await state(client, promises[0]) == await state(client, promises[-1]) == waiting
    assert generated(fakes) == [0, 0]
    await operator.post("replicas/replica-1/resume")
    for promise in promises:
        assert (await client.result(promise)).status_code == 200
    assert generated(fakes) == [0, 20]


async def test_training_goes_on_while_every_replica_is_paused(
    client: Client, operator: httpx2.AsyncClient
):
    for name in ("replica-0", "replica-1"):
        await operator.post(f"replicas/{name}/pause")
    run = await client.run()
    assert (await client.result(await client.train(run, 1, [1, 2]))).status_code == 200


async def test_what_an_operator_aborts_is_asked_again_however_often(
    client: Client, operator: httpx2.AsyncClient, fakes: list[FakeServer]
):
    await operator.post("replicas/replica-1/drain")
    sampler = await client.sampler(await client.session())
    fakes[0].flowing.clear()
    promise = await ask(client, sampler, 0)
    for times in range(1, 5):
        assert await state(client, promise) == ("active", None)
        assert generated(fakes) == [times, 0]
        await operator.post("replicas/replica-0/pause", params={"mode": "abort"})
        paused = ("paused_capacity", "the sampling replicas are paused")
        assert await state(client, promise) == paused
        await operator.post("replicas/replica-0/resume")
        fakes[0].flowing.clear() if times < 4 else fakes[0].flowing.set()
    assert (await client.result(promise)).status_code == 200
    assert [row["lost_requests"] for row in (await operator.get("replicas")).json()] == [0, 0]


async def test_what_an_operator_freezes_goes_on_where_it_was(
    client: Client, operator: httpx2.AsyncClient, fakes: list[FakeServer]
):
    await operator.post("replicas/replica-1/drain")
    sampler = await client.sampler(await client.session())
    fakes[0].flowing.clear()
    promise = await ask(client, sampler, 0)
    assert await state(client, promise) == ("active", None)
    await operator.post("replicas/replica-0/pause", params={"mode": "keep"})
    await operator.post("replicas/replica-1/resume")
    assert await state(client, promise) == ("paused_capacity", "replica-0 is paused")
    await operator.post("replicas/replica-0/resume")
    assert (await client.result(promise)).status_code == 200
    assert generated(fakes) == [1, 0]


async def test_a_replica_drains_what_it_had_frozen(
    client: Client, operator: httpx2.AsyncClient, fakes: list[FakeServer]
):
    await operator.post("replicas/replica-1/drain")
    sampler = await client.sampler(await client.session())
    fakes[0].flowing.clear()
    promise = await ask(client, sampler, 0)
    assert await state(client, promise) == ("active", None)
    await operator.post("replicas/replica-0/pause", params={"mode": "keep"})
    await operator.post("replicas/replica-0/drain")
    assert (await client.result(promise)).status_code == 200
    assert await states(operator) == ["draining", "draining"]


async def test_an_unknown_replica_is_not_found(operator: httpx2.AsyncClient):
    answer = await operator.post("replicas/replica-7/pause")
    assert answer.status_code == 404
    assert "there are: replica-0, replica-1" in answer.json()["detail"]


async def test_all_samplers_name_their_session(client: Client, fakes: list[FakeServer]):
    session = await client.session()
    run = await client.run(session)
    path = await client.saved_for_sampler(run, 1, "mine")
    newest = await client.done(
        "save_weights_for_sampler",
        model_id=run,
        seq_id=2,
        sampling_session_seq_id=2,
        kind="inflight",
    )
    samplers = [
        await client.sampler(session, 0),
        await client.sampler(session, 1, model_path=path),
        newest["sampling_session_id"],
    ]
    for sampler in samplers:
        await client.result(await ask(client, sampler, 0))
    assert sorted(fakes[0].sessions + fakes[1].sessions) == sorted(samplers)


async def test_an_adapter_that_could_not_be_sampled_is_refused_before_it_is_trained(
    client: Client, backend: FakeBackend
):
    response = await client.ask(
        "create_model",
        session_id=await client.session(),
        model_seq_id=0,
        base_model=MODEL,
        lora_config={"rank": MAX_RANK + 1},
    )
    assert (response.status_code, response.json()["category"]) == (400, "user")
    assert f"takes {MAX_RANK} at most" in response.json()["detail"]
    assert "create" not in backend.calls


async def test_a_checkpoint_of_too_large_a_rank_is_refused(client: Client):
    session = await client.session()
    run = await client.run(session, rank=MAX_RANK)
    path = await client.saved(run, 1, "state")
    weights = await client.saved_for_sampler(run, 2, "weights")
    served = client.rooms.catalogue.get(MODEL)
    smaller = replace(served.info, max_lora_rank=MAX_RANK - 1)
    client.rooms.catalogue.add(replace(served, info=smaller))
    answers = [
        await client.ask("load_weights", session_id=session, model_seq_id=1, path=path),
        await client.ask(
            "create_sampling_session",
            session_id=session,
            sampling_session_seq_id=0,
            model_path=weights,
        ),
    ]
    assert [one.status_code for one in answers] == [400, 400]
    assert all(f"takes {MAX_RANK - 1} at most" in one.json()["detail"] for one in answers)


async def test_metrics_tell_of_replicas_and_of_training(
    client: Client, operator: httpx2.AsyncClient
):
    session = await client.session()
    run = await client.run(session)
    await client.result(await client.train(run, 1, [1, 2, 3]))
    await client.result(await ask(client, await client.sampler(session), 0))
    await operator.post("replicas/replica-1/drain")
    answer = await operator.get("metrics")
    assert answer.headers["content-type"].startswith("text/plain")
    found = {
        (sample.name, *sorted(sample.labels.values())): sample.value
        for family in text_string_to_metric_families(answer.text)
        for sample in family.samples
    }
    assert found["hearth_tokens_total", MODEL, "trainer-0"] == 3
    assert found["hearth_ticks_total", MODEL, "trainer-0"] == 2  # the run's creation is one
    requests = [found["hearth_replica_requests_total", f"replica-{i}", MODEL] for i in (0, 1)]
    assert sum(requests) == 1
    assert found["hearth_replica_state", "draining", "replica-1", MODEL] == 1
    assert found["hearth_replica_state", "ready", "replica-1", MODEL] == 0
    assert found["hearth_replica_load", "replica-0", MODEL] == 0
    assert found["hearth_maintenance",] == 0
