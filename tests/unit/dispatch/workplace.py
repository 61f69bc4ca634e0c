"""A server without HTTP: the rooms, and a trainer group with a backend in memory, or several.
Nothing runs by itself: a test takes one round after the other, or has the groups `running`."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from types import MappingProxyType
from typing import Any

from server.catalogue import Catalogue, ServedModel
from server.checkpoints.service import Checkpoints
from server.checkpoints.storage import Storage
from server.core.ids import RunId, TenantId
from server.core.paths import parse_path
from server.core.records import Request, Tenant
from server.core.requests import Kind, State
from server.core.schedule import Tick
from server.dispatch.choosing import DispatchSettings
from server.dispatch.trainers import Trainers
from server.runs import wire
from server.runs.service import Runs
from server.store.database import Database
from server.store.ledger import Ledger
from server.tenancy.sessions import CreateSession, Sessions
from server.wire.json_shapes import parse_json
from tests import bodies
from tests.databases import Clock
from tests.fake_backend import INFO, FakeBackend, FakeRun

MODEL = "tiny/fake"
ME = Tenant(id=TenantId("me"))
OTHER = Tenant(id=TenantId("other"))


class Workplace:
    def __init__(
        self,
        db: Database,
        data: Path,
        backend: FakeBackend,
        clock: Clock,
        *,
        more: Sequence[FakeBackend] = (),
        token_budget: int = 1000,
        snapshot_after_s: float = 1e9,
        run_memory_bytes: int = 2**40,
        max_pass_bytes: int = 2**40,
        room_wait_s: float = 0.0,
        tenant_weights: Mapping[TenantId, float] = MappingProxyType({}),
    ) -> None:
        self.db, self.data, self.backend, self.clock = db, data, backend, clock
        self.backends = [backend, *more]
        self._is_running = False
        self.settings = DispatchSettings(
            token_budget=token_budget,
            gap_wait_s=5.0,
            snapshot_after_s=snapshot_after_s,
            run_memory_bytes=run_memory_bytes,
            tenant_weights=tenant_weights,
        )
        self.ledger = Ledger(db, clock)
        self.sessions = Sessions(db, clock)
        self.storage = Storage(data / "weights")
        self.checkpoints = Checkpoints(db, self.storage, clock)
        catalogue = Catalogue()
        catalogue.add(ServedModel(name=MODEL, tokenizer_id="none", info=INFO))
        self.runs = Runs(
            ledger=self.ledger,
            sessions=self.sessions,
            checkpoints=self.checkpoints,
            catalogue=catalogue,
            lora_alpha=None,
            max_pass_bytes=max_pass_bytes,
            room_wait_s=room_wait_s,
            clock=clock,
            wake=lambda live: self.trainers.wake(live),
        )
        self.trainers = Trainers(
            {MODEL: self.backends},
            registry=self.runs.registry,
            checkpoints=self.checkpoints,
            ledger=self.ledger,
            settings=self.settings,
            clock=clock,
        )
        self.pool = self.trainers.all[0][0]
        self.dispatcher = self.pool.trainers[0].dispatcher

    async def restarted(self, db: Database | None = None) -> Workplace:
        """What a new process finds: the database, the files, and backends that know nothing."""
        for backend in self.backends:
            backend.kill()
        first, *more = self.backends
        later = Workplace(db or self.db, self.data, first, self.clock, more=more)
        await later.runs.resume(await later.ledger.start())
        return later

    @asynccontextmanager
    async def running(self) -> AsyncGenerator[None]:
        """The groups work by themselves meanwhile."""
        self.trainers.start()
        self._is_running = True
        try:
            yield
        finally:
            for backend in self.backends:
                backend.let_go()
            await self.trainers.finish(5)
            await self.trainers.stop()
            self._is_running = False

    # ------------------------------------------------------------ what clients do

    async def create(self, tenant: Tenant = ME, rank: int = 4) -> RunId:
        """A new run, which has its adapter."""
        session = await self.sessions.create(tenant, CreateSession(), None)
        body = {
            "session_id": session.id,
            "model_seq_id": 0,
            "base_model": MODEL,
            "lora_config": {"rank": rank, "seed": 1},
        }
        payload = bodies.encoded(body)
        request = await self.runs.create(tenant, parse_json(wire.CreateModel, payload), payload)
        await (self.finished(request) if self._is_running else self.work())
        assert request.run_id is not None
        return request.run_id

    async def compute(
        self, run: RunId, seq: int, *data: list[int], tenant: Tenant = ME, backward: bool = True
    ) -> Request:
        """A pass with a datum for each list of tokens."""
        body = bodies.forward_backward(run, seq, *data, backward=backward)
        return await self.runs.submit_pass(tenant, bodies.encoded(body), "application/json")

    async def optim_step(self, run: RunId, seq: int, tenant: Tenant = ME) -> Request:
        return await self.submit(Kind.OPTIM_STEP, tenant, **bodies.optim_step(run, seq))

    async def save(self, run: RunId, seq: int, name: str, **more: Any) -> Request:
        return await self.submit(Kind.SAVE, model_id=run, seq_id=seq, path=name, **more)

    async def load(self, run: RunId, seq: int, path: str, optimizer: bool = True) -> Request:
        body = {"model_id": run, "seq_id": seq, "path": path, "optimizer": optimizer}
        return await self.submit(Kind.LOAD, **body)

    async def publish(self, run: RunId, seq: int, number: int, kind: str) -> Request:
        body = {"model_id": run, "seq_id": seq, "sampling_session_seq_id": number, "kind": kind}
        return await self.submit(Kind.SAVE_FOR_SAMPLER, **body)

    async def submit(self, operation: Kind, tenant: Tenant = ME, **body: Any) -> Request:
        payload = bodies.encoded(body)
        envelope = parse_json(wire.RunRequest, payload)
        return await self.runs.submit(tenant, operation, payload, envelope)

    async def outcome(self, request: Request) -> Request:
        return await self.ledger.retrieve(request.id, request.owner, 0)

    async def finished(self, *requests: Request) -> list[Request]:
        """With their outcomes, which the groups are working on."""
        outcomes = [await self.ledger.retrieve(one.id, one.owner, 20) for one in requests]
        assert all(one.state is not State.WAITING for one in outcomes)
        return outcomes

    # ------------------------------------------------------------ what the server does

    async def round(self) -> Tick | None:
        """Choose, run, record; the outcome is on disk when this returns. What waits for its run
        to be restored, or moves to make room, is waited for."""
        tick = self.dispatcher.choose()
        while tick is None and await self.moved():
            tick = self.dispatcher.choose()
        if tick is not None:
            await self.dispatcher.step(tick)
        await self.dispatcher._recorder.recorded()
        return tick

    async def moved(self) -> bool:
        """Wait for one of the runs that come or go; False when none does."""
        moving = self.dispatcher._residency._moving()
        if moving:
            await asyncio.wait(moving, return_when=asyncio.FIRST_COMPLETED)
        return bool(moving)

    async def work(self) -> list[Tick]:
        """Rounds until nothing is ready."""
        ticks = []
        while (tick := await self.round()) is not None:
            ticks.append(tick)
        return ticks

    def state(self, run: RunId) -> FakeRun:
        """Where it is in memory: in one place."""
        [state] = [one.runs[run] for one in self.backends if run in one.runs]
        return state

    def live(self, run: RunId) -> Any:
        return self.runs.registry.known(run)

    async def checkpoint_folder(self, path: str) -> str:
        found = await self.checkpoints.find(parse_path(path))
        assert found is not None
        return found.folder


async def settled(task: asyncio.Task[Any], *events: asyncio.Event) -> None:
    """Until the task is over or one of the events is set."""
    waits = [asyncio.ensure_future(event.wait()) for event in events]
    await asyncio.wait([task, *waits], return_when=asyncio.FIRST_COMPLETED)
    for wait in waits:
        wait.cancel()
