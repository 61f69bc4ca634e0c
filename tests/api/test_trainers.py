"""Several trainer groups, as clients and operators see them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator

import httpx2
import pytest
import pytest_asyncio
from fastapi import FastAPI
from prometheus_client.parser import text_string_to_metric_families

from server.app import Service
from server.operate import trainer_table
from server.settings import Settings
from tests import bodies
from tests.api.client import Client
from tests.api.test_maintenance import operator_of, told
from tests.databases import Clock
from tests.fake_backend import FakeBackend

MODEL, SECOND = "tiny/fake", "tiny/second"
NAMES = ["trainer-0", "trainer-1"]


@pytest.fixture
def backends() -> dict[str, list[FakeBackend]]:
    return {MODEL: [FakeBackend(), FakeBackend()], SECOND: [FakeBackend()]}


@pytest_asyncio.fixture
async def client(
    app: FastAPI, settings: Settings, clock: Clock, backends: dict[str, list[FakeBackend]]
) -> AsyncGenerator[Client]:
    models = dict.fromkeys(backends, settings.models[MODEL])
    service = Service(settings.model_copy(update={"models": models}), clock, backends)
    await service.start()
    app.state.rooms = service.rooms
    async with Client(app) as client:
        yield client
    for groups in backends.values():
        for backend in groups:
            backend.let_go()
    await service.stop()


@pytest.fixture
def operator(app: FastAPI, client: Client) -> httpx2.AsyncClient:
    return operator_of(app)


async def shown(operator: httpx2.AsyncClient) -> dict[str, dict]:
    # Without a network between, a call need not let anybody else run.
    await asyncio.sleep(0.001)
    rows = (await operator.get("trainers")).json()
    assert trainer_table(rows).row_count == len(rows)
    return {row["name"]: row for row in rows}


async def at_home(operator: httpx2.AsyncClient, run: str) -> str:
    while True:
        for name, row in (await shown(operator)).items():
            if run in row["runs"]:
                return name


async def test_every_group_of_every_base_model_has_its_own_name(
    client: Client, operator: httpx2.AsyncClient
):
    session = await client.session()
    runs = [await client.run(session, number) for number in range(2)]
    rows = await shown(operator)
    assert {name: row["model"] for name, row in rows.items()} == {
        "trainer-0": MODEL,
        "trainer-1": MODEL,
        "trainer-2": SECOND,
    }
    assert {row["state"] for row in rows.values()} == {"ready"}
    assert [rows[name]["runs"] for name in NAMES] == [[run] for run in runs]
    memory = (await operator.get("memory")).json()
    assert [list(memory[name]["runs"]) for name in NAMES] == [[run] for run in runs]
    assert memory["trainer-2"]["runs"] == {}


async def test_memory_is_told_of_the_groups_that_are_alive(
    client: Client, operator: httpx2.AsyncClient, backends: dict[str, list[FakeBackend]]
):
    backends[MODEL][0].hold()
    backends[MODEL][0].kill()
    assert (await operator.get("memory")).json().keys() == {"trainer-1", "trainer-2"}
    assert (await shown(operator))["trainer-0"]["state"] == "lost"


async def test_an_operator_moves_a_run(client: Client, operator: httpx2.AsyncClient):
    run = await client.run()
    assert await at_home(operator, run) == "trainer-0"
    answer = await operator.post(f"runs/{run}/move")
    assert answer.json() == {"trainer": "trainer-1"}
    assert (await client.result(await client.train(run, 1, [1, 2]))).status_code == 200
    assert await at_home(operator, run) == "trainer-1"
    answer = await operator.post(f"runs/{run}/move", params={"trainer": "trainer-0"})
    assert answer.json() == {"trainer": "trainer-0"}
    done = await client.done("optim_step", **bodies.optim_step(run, 2))
    # 0.9 of the weight that was 1, and 0.01 of the gradient that moved to and fro
    assert done["metrics"]["weight"] == pytest.approx(0.9 + 0.01 * 3)


async def test_what_waits_for_drained_groups_is_told_so_and_goes_on_with_the_first(
    client: Client, operator: httpx2.AsyncClient, backends: dict[str, list[FakeBackend]]
):
    run = await client.run()
    for name in NAMES:
        assert (await operator.post(f"trainers/{name}/drain")).status_code == 200
    while {(await shown(operator))[name]["state"] for name in NAMES} != {"drained"}:
        pass
    promise = await client.train(run, 1, [1, 2])
    assert await told(client, promise) == {
        "queue_state": "paused_capacity",
        "queue_state_reason": "every trainer is drained",
    }
    assert [backend.runs for backend in backends[MODEL]] == [{}, {}]
    await operator.post("trainers/trainer-1/resume")
    assert (await client.result(promise)).status_code == 200
    assert await at_home(operator, run) == "trainer-1"


async def test_a_sole_group_is_drained_and_resumed_too(
    client: Client, operator: httpx2.AsyncClient, backends: dict[str, list[FakeBackend]]
):
    promise = await client.answer(
        "create_model",
        session_id=await client.session(),
        model_seq_id=0,
        base_model=SECOND,
        lora_config={"rank": 4},
    )
    await client.result(promise)
    run = promise["model_id"]
    await operator.post("trainers/trainer-2/drain")
    while (await shown(operator))["trainer-2"]["state"] != "drained":
        pass
    promise = await client.train(run, 1, [4])
    assert (await told(client, promise))["queue_state_reason"] == "every trainer is drained"
    await operator.post("trainers/trainer-2/resume")
    assert (await client.result(promise)).status_code == 200
    assert backends[SECOND][0].runs[run].gradient == 4


async def test_a_session_that_ends_frees_its_runs_wherever_they_are(
    client: Client, operator: httpx2.AsyncClient, backends: dict[str, list[FakeBackend]]
):
    session = await client.session()
    runs = [await client.run(session, number) for number in range(2)]
    await operator.post(f"runs/{runs[0]}/move", params={"trainer": "trainer-1"})
    await client.result(await client.train(runs[0], 1, [1]))
    client.rooms.release(session)
    while any(backend.runs for backend in backends[MODEL]):
        assert (await shown(operator)).keys() == {*NAMES, "trainer-2"}


@pytest.mark.parametrize(
    ("route", "status", "words"),
    [
        ("trainers/trainer-9/drain", 404, "there are: trainer-0, trainer-1, trainer-2"),
        ("trainers/trainer-9/resume", 404, "trainer-9"),
        ("runs/nobody/move", 404, "nobody"),
        ("runs/RUN/move?trainer=trainer-9", 404, "trainer-9"),
        ("runs/RUN/move?trainer=trainer-2", 400, f"trainer-2 trains {SECOND}"),
    ],
)
async def test_what_cannot_be_done_is_refused(
    client: Client, operator: httpx2.AsyncClient, route: str, status: int, words: str
):
    answer = await operator.post(route.replace("RUN", await client.run()))
    assert answer.status_code == status
    assert words in answer.json()["detail"]


@pytest.mark.parametrize("route", ["trainers/trainer-0/drain", "runs/x/move"])
async def test_nobody_else_operates_them(client: Client, operator: httpx2.AsyncClient, route: str):
    answer = await operator.post(route, headers={"authorization": "Bearer guess"})
    assert answer.status_code == 401


async def test_metrics_tell_of_each_group(client: Client, operator: httpx2.AsyncClient):
    run = await client.run()
    await client.result(await client.train(run, 1, [1, 2, 3]))
    await operator.post(f"runs/{run}/move")
    await client.result(await client.train(run, 2, [1, 2]))
    await operator.post("trainers/trainer-2/drain")
    families = text_string_to_metric_families((await operator.get("metrics")).text)
    found = {
        (sample.name, sample.labels["trainer"], sample.labels.get("state")): sample.value
        for family in families
        for sample in family.samples
        if "trainer" in sample.labels
    }
    assert [found["hearth_tokens_total", name, None] for name in NAMES] == [3, 2]
    assert [found["hearth_trainer_arrivals_total", name, None] for name in NAMES] == [0, 1]
    assert [found["hearth_trainer_runs", name, None] for name in NAMES] == [0, 1]
    assert [found["hearth_trainer_waiting", name, None] for name in NAMES] == [0, 0]
    assert [found["hearth_trainer_restarts_total", name, None] for name in NAMES] == [0, 0]
    assert found["hearth_trainer_state", "trainer-2", "drained"] == 1
    assert found["hearth_trainer_state", "trainer-1", "ready"] == 1
    assert found["hearth_trainer_state", "trainer-1", "lost"] == 0


async def test_memory_is_divided_among_the_groups_of_all_models(client: Client, settings: Settings):
    each = settings.run_memory_bytes // 3
    dispatchers = [trainer.dispatcher for _, trainer in client.rooms.trainers.all]
    assert [one._residency._memory_bytes for one in dispatchers] == [each] * 3
