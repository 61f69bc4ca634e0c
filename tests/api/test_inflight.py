"""In-flight weights: what becomes of samples under way when newer ones are saved."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from backends.contract import SampleRequest
from server.housekeeping import Housekeeping
from server.settings import Settings
from tests import bodies
from tests.api.client import Client
from tests.databases import Clock
from tests.fake_backend import FakeBackend


class PatientBackend(FakeBackend):
    """Takes up samples at once, and has them wait before they are done."""

    def __init__(self) -> None:
        super().__init__()
        self.taken: list[SampleRequest] = []
        self.ready = asyncio.Event()

    async def sample(self, request: SampleRequest):
        self.taken.append(request)
        await self.ready.wait()
        return await super().sample(request)


@pytest.fixture
def backend() -> PatientBackend:
    return PatientBackend()


@pytest.fixture
def settings(settings: Settings, request: pytest.FixtureRequest) -> Settings:
    changes = {"inflight_swap": getattr(request, "param", "keep"), "max_running_samples": 1}
    return settings.model_copy(update=changes)


def swap(how: str) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("settings", [how], indirect=True)


async def saved(client: Client, run: str, number: int) -> str:
    done = await client.done(
        "save_weights_for_sampler",
        model_id=run,
        seq_id=number + 1,
        sampling_session_seq_id=number,
        kind="inflight",
    )
    return done["sampling_session_id"]


def newest(client: Client, run: str) -> str:
    folder = client.rooms.runs.registry.known(run).run.inflight_folder
    return client.rooms.checkpoints.storage.path(folder)


async def taken(backend: PatientBackend, count: int) -> None:
    while len(backend.taken) < count:  # noqa: ASYNC110 - the fake tells nobody
        await asyncio.sleep(0)


async def over_a_save(client: Client, backend: PatientBackend) -> tuple[str, str]:
    """The adapters before and after a save, while one sample is under way and one waits."""
    run = await client.run()
    sampler = await saved(client, run, 0)
    old = newest(client, run)
    promises = [await client.answer("asample", **bodies.sample(sampler, i, [1])) for i in range(2)]
    await taken(backend, 1)
    await saved(client, run, 1)
    backend.ready.set()
    for promise in promises:
        assert "protobuf" in (await client.result(promise)).headers["content-type"]
    return old, newest(client, run)


@swap("keep")
async def test_the_engine_is_told_of_newer_weights_and_who_waits_begins_with_them(
    client: Client, backend: PatientBackend
):
    old, new = await over_a_save(client, backend)
    assert backend.updates == [(old, new)]
    assert [one.adapter for one in backend.taken] == [old, new]


@swap("wait")
async def test_samples_may_finish_with_the_weights_they_have(
    client: Client, backend: PatientBackend
):
    old, new = await over_a_save(client, backend)
    assert backend.updates == []
    assert [one.adapter for one in backend.taken] == [old, new]


@swap("abort")
async def test_samples_may_start_again_with_newer_weights(client: Client, backend: PatientBackend):
    old, new = await over_a_save(client, backend)
    assert backend.updates == []
    assert [one.adapter for one in backend.taken] == [old, new, new]
    assert [one.request_id[-2:] for one in backend.taken] == [":0", ":0", ":1"]


@swap("abort")
async def test_what_would_start_again_ends_when_the_service_does(
    client: Client, backend: PatientBackend
):
    run = await client.run()
    sampler = await saved(client, run, 0)
    await client.answer("asample", **bodies.sample(sampler, 0, [1]))
    await taken(backend, 1)
    ends: list[asyncio.Task[None]] = []
    client.rooms.runs.registry.listen(
        lambda *_: ends.append(asyncio.create_task(client.rooms.samplers.drain()))
    )
    await saved(client, run, 1)
    async with asyncio.timeout(5):
        await ends[0]
    assert len(backend.taken) == 1


@swap("keep")
async def test_one_whose_engine_is_lost_starts_again_with_the_newest_weights(
    client: Client, backend: PatientBackend
):
    run = await client.run()
    sampler = await saved(client, run, 0)
    promise = await client.answer("asample", **bodies.sample(sampler, 0, [1]))
    await taken(backend, 1)
    await saved(client, run, 1)
    backend.die_in["sample"] = 0
    backend.ready.set()
    assert "protobuf" in (await client.result(promise)).headers["content-type"]
    assert backend.taken[-1].adapter == newest(client, run)


@swap("abort")
async def test_other_runs_and_snapshots_are_left_alone(client: Client, backend: PatientBackend):
    runs = [await client.run(), await client.run()]
    samplers = [await saved(client, run, 0) for run in runs]
    promise = await client.answer("asample", **bodies.sample(samplers[0], 0, [1]))
    await taken(backend, 1)
    await saved(client, runs[1], 1)
    backend.ready.set()
    assert "protobuf" in (await client.result(promise)).headers["content-type"]
    assert len(backend.taken) == 1


@swap("keep")
async def test_weights_stay_as_long_as_a_sample_that_had_them(
    client: Client, backend: PatientBackend, clock: Clock
):
    run = await client.run()
    sampler = await saved(client, run, 0)
    promise = await client.answer("asample", **bodies.sample(sampler, 0, [1]))
    await taken(backend, 1)
    folders = [newest(client, run)]
    for number in (1, 2):
        await saved(client, run, number)
        folders.append(newest(client, run))
    await swept(client, clock)
    assert there(folders) == [True, True, True]
    backend.ready.set()
    await client.result(promise)
    await swept(client, clock)
    assert there(folders) == [False, False, True]


async def swept(client: Client, clock: Clock) -> None:
    clock.now += 61
    await Housekeeping(client.rooms).sweep()


def there(folders: list[str]) -> list[bool]:
    return [Path(folder).exists() for folder in folders]
