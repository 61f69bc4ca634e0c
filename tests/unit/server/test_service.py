"""Start and stop of the whole service: what it finds, what it keeps, what it refuses."""

from __future__ import annotations

import asyncio
import re
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import text

from backends.contract import BackendError, ModelInfo
from server import housekeeping
from server.app import Service, StartRefused, create_app
from server.core.ids import RequestId, RunId, SessionId
from server.core.requests import Kind, State
from server.housekeeping import Housekeeping
from server.runs import wire
from server.samplers.service import CreateSamplingSession
from server.settings import Settings
from server.tenancy.keys import LOCAL
from server.tenancy.sessions import CreateSession
from server.wire.json_shapes import parse_json
from tests import bodies
from tests.databases import Clock
from tests.fake_backend import FakeBackend

MODEL = "tiny/fake"


def new_service(data: Path, backends: dict[str, FakeBackend], **settings: Any) -> Service:
    models = {name: Path("/models") for name in backends}
    return Service(
        Settings(data=data, models=models, **settings),
        Clock(),
        {name: [one] for name, one in backends.items()},
    )


async def a_run(service: Service) -> RunId:
    session = await service.rooms.sessions.create(LOCAL, CreateSession(), None)
    body = bodies.encoded({"session_id": session.id, "model_seq_id": 0, "base_model": MODEL})
    request = await service.rooms.runs.create(LOCAL, parse_json(wire.CreateModel, body), body)
    await service.rooms.ledger.retrieve(request.id, LOCAL.id, 5)
    assert request.run_id is not None
    return request.run_id


async def a_sampler(service: Service) -> str:
    session = await service.rooms.sessions.create(LOCAL, CreateSession(), None)
    body = CreateSamplingSession(session_id=session.id, sampling_session_seq_id=0, base_model=MODEL)
    return (await service.rooms.samplers.create(LOCAL, body)).id


async def submit(service: Service, run: RunId, seq: int) -> RequestId:
    body = bodies.encoded(bodies.forward_backward(run, seq, [1]))
    return (await service.rooms.runs.submit_pass(LOCAL, body, "application/json")).id


async def state(service: Service, request: str, hold_s: float = 5) -> State:
    found = await service.rooms.ledger.retrieve(RequestId(request), LOCAL.id, hold_s)
    return found.state


async def test_what_waits_when_it_stops_is_done_after_the_next_start(data: Path):
    backend = FakeBackend()
    first = new_service(data, {MODEL: backend}, drain_grace_s=0)
    await first.start()
    run, sampler = await a_run(first), await a_sampler(first)
    backend.hold()
    training = await submit(first, run, 1)
    sample = await first.rooms.samplers.submit(
        LOCAL, bodies.encoded(bodies.sample(sampler, 0, [1]))
    )
    await first.stop()

    second = new_service(data, {MODEL: FakeBackend()})
    await second.start()
    assert await state(second, training) is State.DONE
    assert await state(second, sample.request) is State.DONE
    await second.stop()


async def test_a_model_that_is_gone_leaves_its_requests_waiting_for_its_return(data: Path):
    backend = FakeBackend()
    first = new_service(data, {MODEL: backend}, drain_grace_s=0)
    await first.start()
    run, sampler = await a_run(first), await a_sampler(first)
    backend.hold()
    training = await submit(first, run, 1)
    sample = await first.rooms.samplers.submit(
        LOCAL, bodies.encoded(bodies.sample(sampler, 0, [1]))
    )
    await first.stop()

    without = new_service(data, {"other/model": FakeBackend()})
    await without.start()
    assert await state(without, training, hold_s=0.05) is State.WAITING
    await without.rooms.runs.get(LOCAL, run)
    session = RunId(run.rpartition(":train:")[0])
    without.rooms.release(session)  # type: ignore[arg-type]
    await Housekeeping(without.rooms).sweep()
    await without.stop()

    back = new_service(data, {MODEL: FakeBackend()})
    await back.start()
    assert await state(back, training) is State.DONE
    assert await state(back, sample.request) is State.DONE
    await back.stop()


async def test_a_sample_that_is_no_longer_possible_does_not_stop_the_start(data: Path):
    backend = FakeBackend()
    first = new_service(data, {MODEL: backend})
    await first.start()
    sampler = await a_sampler(first)
    backend.hold()
    sample = await first.rooms.samplers.submit(
        LOCAL, bodies.encoded(bodies.sample(sampler, 0, [1]))
    )
    await first.rooms.ledger.db.write(
        lambda s: s.execute(
            text("UPDATE requests SET payload = :body WHERE kind = 'sample'"),
            {"body": bodies.encoded(bodies.sample(sampler, 0, [5000]))},
        )
    )
    await first.stop()

    second = new_service(data, {MODEL: FakeBackend()})
    await second.start()
    found = await second.rooms.ledger.retrieve(sample.request, LOCAL.id, 5)
    assert found.error_category == "user"
    assert "5000" in (found.error or "")
    await second.stop()


async def test_folders_that_a_crash_left_are_removed_and_no_others(data: Path):
    first = new_service(data, {MODEL: FakeBackend()})
    await first.start()
    run = await a_run(first)
    await state(first, await submit(first, run, 1))
    storage = first.rooms.checkpoints.storage
    orphan = storage.root / storage.new()
    orphan.mkdir()
    await first.stop()
    snapshot = first.rooms.runs.registry.known(run).run.snapshot_folder

    second = new_service(data, {MODEL: FakeBackend()})
    await second.start()
    assert [entry.name for entry in storage.root.iterdir()] == [snapshot]
    await second.stop()


async def test_a_trainer_group_that_cannot_start_is_named_by_its_own_words(data: Path):
    class Unable(FakeBackend):
        async def describe(self) -> ModelInfo:
            raise BackendError("there is no cuda:1")

    models = {MODEL: Path("/models")}
    groups = [FakeBackend(), Unable()]
    service = Service(Settings(data=data, models=models), Clock(), {MODEL: groups})
    with pytest.raises(BackendError, match="there is no cuda:1"):
        await service.start()
    await service.stop()


async def test_others_are_let_in_only_with_keys(data: Path):
    service = new_service(data, {MODEL: FakeBackend()}, host="0.0.0.0")
    with pytest.raises(StartRefused, match="hearth keys create"):
        await service.start()
    await service.rooms.keys.create("ann", "ann", "default")
    await service.stop()

    service = new_service(data, {MODEL: FakeBackend()}, host="0.0.0.0")
    await service.start()
    await service.stop()


async def test_servers_of_one_model_cannot_sample_two(data: Path):
    backends = {MODEL: FakeBackend(), "tiny/other": FakeBackend()}
    service = new_service(data, backends, engine="vllm", engine_urls=("http://127.0.0.1:1",))
    with pytest.raises(StartRefused, match="of one base model"):
        await service.start()
    await service.stop()


async def test_devices_are_as_many_as_what_is_started_on_them(data: Path):
    engine = {"engine": "vllm", "engine_replicas": 2, "engine_devices": ("1",)}
    service = new_service(data, {MODEL: FakeBackend()}, **engine)
    with pytest.raises(StartRefused, match="for 1, but 2 vLLM servers are started"):
        await service.start()
    await service.stop()


@pytest.mark.parametrize(
    ("engine", "url", "why"),
    [
        ("embedded", "http://127.0.0.1:1", "engine is 'embedded', which uses none"),
        ("vllm", "127.0.0.1:8000", "'127.0.0.1:8000', which is not of the form http://HOST:PORT"),
        ("vllm", "http://", "'http://', which is not"),
        ("vllm", "http://127.0.0.1:99999", "'http://127.0.0.1:99999', which is not"),
        ("vllm", "http://127.0.0.1:8000/v1", "'http://127.0.0.1:8000/v1', which is not"),
        ("vllm", "ftp://127.0.0.1:1", "'ftp://127.0.0.1:1', which is not"),
        ("vllm", "http:// a", "'http:// a', which is not"),
        ("vllm", "", "'', which is not"),
    ],
)
async def test_servers_that_cannot_be_used_are_refused_before_a_model_is_loaded(
    data: Path, engine: str, url: str, why: str
):
    backend = FakeBackend()
    service = new_service(data, {MODEL: backend}, engine=engine, engine_urls=(url,))
    with pytest.raises(StartRefused, match=re.escape(why)):
        await service.start()
    assert backend.calls == []
    await service.stop()


async def test_a_model_that_cannot_be_loaded_is_told_by_the_app(
    data: Path, monkeypatch: pytest.MonkeyPatch
):
    backend = FakeBackend()

    async def fail() -> Any:
        raise BackendError("no such model")

    monkeypatch.setattr(backend, "describe", fail)
    app = create_app(Settings(data=data, models={}), backends={MODEL: [backend]})
    with pytest.raises(BackendError):
        async with app.router.lifespan_context(app):
            raise AssertionError("it must not start")
    assert str(app.state.failure) == "no such model"


async def test_a_start_that_takes_too_long_can_be_interrupted(
    data: Path, monkeypatch: pytest.MonkeyPatch
):
    backend = FakeBackend()

    async def hang() -> Any:
        app.state.interrupt_start()
        await asyncio.Event().wait()

    monkeypatch.setattr(backend, "describe", hang)
    app = create_app(Settings(data=data, models={}), backends={MODEL: [backend]})
    with pytest.raises(StartRefused, match="stopped before it was ready"):
        async with app.router.lifespan_context(app):
            raise AssertionError("it must not start")
    assert str(app.state.failure) == "stopped before it was ready"


async def test_housekeeping_goes_on_after_a_bad_moment(data: Path, monkeypatch: pytest.MonkeyPatch):
    service = new_service(data, {MODEL: FakeBackend()})
    await service.start()
    keeper, sweeps = Housekeeping(service.rooms), []

    async def sweep() -> None:
        sweeps.append(1)
        if len(sweeps) == 1:
            raise OSError("disk I/O error")

    monkeypatch.setattr(housekeeping, "PERIOD_S", 0.01)
    monkeypatch.setattr(keeper, "sweep", sweep)
    keeping = asyncio.create_task(keeper.run())
    await asyncio.sleep(0.1)
    keeping.cancel()
    assert len(sweeps) > 1
    await service.stop()


async def with_unnamed_sampler(service: Service) -> SessionId:
    """A session whose run's weights have been published without a name."""
    rooms, run = service.rooms, await a_run(service)
    body = bodies.encoded({"model_id": run, "seq_id": 1, "sampling_session_seq_id": 0})
    envelope = parse_json(wire.RunRequest, body)
    saved = await rooms.runs.submit(LOCAL, Kind.SAVE_FOR_SAMPLER, body, envelope)
    assert await state(service, saved.id) is State.DONE
    session = (await rooms.runs.get(LOCAL, run)).session_id
    assert session is not None
    return session


async def test_unnamed_samplers_of_a_finished_session_give_their_space_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    service = new_service(tmp_path, {MODEL: FakeBackend()})
    await service.start()
    rooms = service.rooms
    session = await with_unnamed_sampler(service)
    (sampler,) = await rooms.samplers.of_session(session)
    assert sampler.folder is not None
    monkeypatch.setattr("server.checkpoints.service.RETIREMENT_S", -1)

    await Housekeeping(rooms).sweep()
    assert rooms.checkpoints.storage.exists(sampler.folder)  # its client may still sample

    await rooms.sessions.finish(LOCAL, session, "success", None)
    await Housekeeping(rooms).sweep()
    assert not rooms.checkpoints.storage.exists(sampler.folder)
    await service.stop()


async def test_a_server_that_was_away_for_days_keeps_what_its_clients_come_back_for(
    tmp_path: Path,
) -> None:
    clock = Clock()
    service = Service(
        Settings(data=tmp_path, models={MODEL: Path("/models")}), clock, {MODEL: [FakeBackend()]}
    )
    await service.start()
    rooms = service.rooms
    session = await with_unnamed_sampler(service)
    clock.now += 3 * housekeeping.ABANDONED_AFTER_S
    after_the_outage = Housekeeping(rooms)

    await after_the_outage.sweep()
    (sampler,) = await rooms.samplers.of_session(session)
    assert sampler.folder is not None

    clock.now += 2 * housekeeping.ABANDONED_AFTER_S
    await after_the_outage.sweep()
    (sampler,) = await rooms.samplers.of_session(session)
    assert sampler.folder is None
    await service.stop()
