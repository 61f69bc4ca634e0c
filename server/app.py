"""The composition root: builds the rooms and joins them."""

from __future__ import annotations

import asyncio
import ipaddress
import secrets
import time
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from itertools import chain
from pathlib import Path
from typing import Protocol

import structlog
from alembic.util import CommandError
from fastapi import FastAPI

from backends.contract import (
    BackendError,
    ModelInfo,
    SamplingEngine,
    SamplingFleet,
)
from server import assembly
from server.api import (
    archives,
    audit,
    auth,
    checkpoints,
    client,
    errors,
    futures,
    losses,
    oai,
    operators,
    sampling,
    search,
    sessions,
    traces,
    training,
    usage,
    weights,
)
from server.api.rooms import Rooms, SamplingWorker
from server.audit.service import Audit
from server.catalogue import Catalogue, ServedModel
from server.checkpoints import queries as checkpoint_queries
from server.checkpoints.downloads import Downloads, load_secret
from server.checkpoints.service import Checkpoints
from server.checkpoints.storage import Storage
from server.dispatch.choosing import DispatchSettings
from server.dispatch.device import Restartable
from server.dispatch.trainers import Trainers
from server.housekeeping import Housekeeping
from server.losses.service import Check, CustomLosses
from server.oai.bills import Bills
from server.oai.models import Models
from server.oai.service import OpenAI
from server.parallelism import microbatches_at_once
from server.replicas import Replicas
from server.runs import queries as run_queries
from server.runs.service import Runs
from server.samplers import queries as sampler_queries
from server.samplers.inflight import InflightWeights
from server.samplers.service import Samplers
from server.settings import Settings
from server.store.database import AsyncSession, Database, sqlite_url
from server.store.ledger import Ledger
from server.store.migrate import migrate
from server.tenancy.keys import Keys
from server.tenancy.search import SessionSearch
from server.tenancy.sessions import Sessions
from server.tenancy.tokens import Tokens
from server.traces.service import Traces
from server.usage.service import Usage

log = structlog.get_logger()

_ROUTES = (
    client,
    auth,
    search,
    sessions,
    training,
    losses,
    sampling,
    futures,
    checkpoints,
    weights,
    archives,
    usage,
    audit,
    traces,
)


class StartRefused(Exception):
    """The settings do not allow a start; the message says which."""


class Backend(Restartable, SamplingEngine, Protocol):
    """Trains and samples one base model."""

    async def stop(self, grace_s: float) -> None: ...


class Service:
    """Everything that runs while the server does, in the order it starts; it stops in reverse."""

    def __init__(
        self,
        settings: Settings,
        clock: Callable[[], float] = time.time,
        backends: Mapping[str, Sequence[Backend]] | None = None,
        fleets: Mapping[str, SamplingFleet] | None = None,
    ) -> None:
        """`backends` stand in for the workers that the settings would start, one a trainer group,
        `fleets` for the vLLM replicas."""
        self._settings = settings
        self._db = Database(settings.database_url or sqlite_url(settings.data / "hearth.db"))
        self._catalogue = Catalogue()
        self._backends: Mapping[str, Sequence[Backend]] = backends or {
            name: assembly.trainer_groups(settings, name) for name in settings.models
        }
        workers = {name: assembly.sampling_worker(settings, name) for name in settings.models}
        self._sampling_workers = {name: one for name, one in workers.items() if one is not None}
        self._fleets: dict[str, SamplingFleet] = dict(fleets or {})
        self._engines: dict[str, SamplingEngine] = {
            **{name: groups[0] for name, groups in self._backends.items()},
            **self._sampling_workers,
            **self._fleets,
        }
        self._gates = assembly.gates(settings, self._backends, self._frozen_samples)
        self._housekeeping: asyncio.Task[None] | None = None
        self.rooms = self._build_rooms(clock)
        self._clock = clock

    async def start(self) -> None:
        """Raises BackendError when a model cannot be loaded or sampled, CommandError when the data
        is of a newer Hearth."""
        await migrate(self._db.engine)
        self._db.start()
        await self.rooms.keys.start()
        if not self.rooms.keys.required and not _is_loopback(self._settings.host):
            raise StartRefused(
                f"host is {self._settings.host}, which others can reach, and nobody would be "
                "asked for a key: make one first with `hearth keys create NAME`"
            )
        if (reason := assembly.refusal(self._settings)) is not None:
            raise StartRefused(reason)
        for name in self._backends:
            await self._start_model(name)
        await self._remove_orphans()
        unfinished = await self.rooms.ledger.start()
        await self.rooms.runs.resume(unfinished)
        await self.rooms.samplers.resume(unfinished)
        self._trainers.start()
        housekeeping = Housekeeping(self.rooms)
        self._housekeeping = asyncio.create_task(housekeeping.run())

    async def _start_model(self, name: str) -> None:
        info = assembly.limited(await _started(self._backends[name]), self._settings)
        if name in self._sampling_workers:
            await self._sampling_workers[name].describe()
        if self._settings.engine == "vllm":
            if name not in self._fleets:
                self._fleets[name] = assembly.vllm_fleet(self._settings, name, info)
            self._engines[name] = self._fleets[name]
            await self._fleets[name].start()
        path = self._settings.models[name]
        self._catalogue.add(ServedModel(name=name, tokenizer_id=tokenizer_id(path), info=info))
        log.info("model_ready", model=name, parameters=info.num_parameters, dtype=info.dtype)

    async def stop(self) -> None:
        """Take no new work, finish what runs, put every run's state on disk."""
        self.rooms.drain()
        if self._housekeeping is not None:
            self._housekeeping.cancel()
            with suppress(asyncio.CancelledError):
                await self._housekeeping
        await self._trainers.finish(self._settings.drain_grace_s)
        await self.rooms.samplers.drain()
        await self.rooms.oai.stop()
        await self.rooms.traces.stop()
        await asyncio.gather(*(fleet.stop() for fleet in self._fleets.values()))
        workers = [*chain(*self._backends.values()), *self._sampling_workers.values()]
        await asyncio.gather(*(worker.stop(grace_s=5.0) for worker in workers))
        await self._trainers.stop()
        await self._db.stop()

    def _build_rooms(self, clock: Callable[[], float]) -> Rooms:
        settings, data = self._settings, self._settings.data
        secret = load_secret(data / "download.key")
        ledger = Ledger(self._db, clock)
        usage_room = Usage(self._db, clock)
        ledger.listen(usage_room.record)
        sessions_room = Sessions(self._db, clock)
        storage = Storage(data / "weights")
        checkpoints_room = Checkpoints(self._db, storage, clock)
        runs = Runs(
            ledger=ledger,
            sessions=sessions_room,
            checkpoints=checkpoints_room,
            catalogue=self._catalogue,
            lora_alpha=settings.lora_alpha,
            max_pass_bytes=settings.max_waiting_training_bytes,
            clock=clock,
            wake=lambda live: self._trainers.wake(live),
            refuse_stable_reinforce=settings.stable_reinforce == "refuse",
        )
        self._trainers = Trainers(
            self._backends,
            registry=runs.registry,
            checkpoints=checkpoints_room,
            ledger=ledger,
            settings=self._dispatch_settings(),
            clock=clock,
        )
        samplers = self._build_samplers(ledger, sessions_room, checkpoints_room, runs, clock)
        return Rooms(
            settings=settings,
            catalogue=self._catalogue,
            keys=Keys(self._db, clock, Tokens(load_secret(data / "jwt.key"), clock)),
            sessions=sessions_room,
            runs=runs,
            losses=CustomLosses(ledger, sessions_room, self._loss_checks(), clock),
            samplers=samplers,
            oai=self._build_oai(samplers, checkpoints_room, clock),
            checkpoints=checkpoints_room,
            downloads=Downloads(storage, secret, clock),
            ledger=ledger,
            search=SessionSearch(self._db, clock),
            usage=usage_room,
            audit=Audit(self._db, clock),
            traces=Traces(self._db, data / "traces", secret, clock),
            trainers=self._trainers,
            replicas=Replicas(self._fleets, self._replicas_changed),
            hold=self._hold,
            sampling_workers=self._sampling_status,
            operator_token=secrets.token_urlsafe(),
        )

    def _build_samplers(
        self,
        ledger: Ledger,
        sessions_room: Sessions,
        checkpoints_room: Checkpoints,
        runs: Runs,
        clock: Callable[[], float],
    ) -> Samplers:
        return Samplers(
            ledger=ledger,
            sessions=sessions_room,
            checkpoints=checkpoints_room,
            catalogue=self._catalogue,
            runs=runs.registry,
            engines=self._engines,
            gates=self._gates,
            inflight=InflightWeights(
                runs.registry,
                checkpoints_room.storage,
                self._engines,
                self._settings.inflight_swap,
            ),
            max_waiting=self._settings.max_waiting_samples,
            clock=clock,
        )

    def _loss_checks(self) -> Mapping[str, Check]:
        return {name: groups[0].check_loss for name, groups in self._backends.items()}

    def _build_oai(
        self, samplers: Samplers, checkpoints_room: Checkpoints, clock: Callable[[], float]
    ) -> OpenAI:
        return OpenAI(
            models=Models(self._catalogue, checkpoints_room, self._settings.models),
            samplers=samplers,
            bills=Bills(self._db, clock),
            clock=clock,
        )

    def _dispatch_settings(self) -> DispatchSettings:
        settings = self._settings
        num_groups = sum(len(groups) for groups in self._backends.values())
        return DispatchSettings(
            token_budget=settings.tick_token_budget * microbatches_at_once(settings),
            gap_wait_s=settings.gap_wait_s,
            snapshot_after_s=settings.snapshot_after_s,
            run_memory_bytes=settings.run_memory_bytes // num_groups,
            tenant_weights=assembly.tenant_weights(settings),
        )

    def _hold(self, on: bool) -> None:
        self._trainers.hold(on)
        for gate in self._gates.values():
            if on:
                gate.hold()
            else:
                gate.let_go()

    def _frozen_samples(self, model: str) -> int:
        fleet = self._fleets.get(model)
        return 0 if fleet is None else fleet.frozen_samples()

    def _replicas_changed(self) -> None:
        """Requests may have to wait, or not wait any more."""
        self.rooms.ledger.wake_all()
        for gate in self._gates.values():
            gate.look_again()

    def _sampling_status(self) -> list[SamplingWorker]:
        return [
            SamplingWorker(model=name, alive=one.alive, generation=one.generation)
            for name, one in self._sampling_workers.items()
        ]

    async def _remove_orphans(self) -> None:
        """Folders that a crash left before any row named them."""

        async def folders(db: AsyncSession) -> set[str]:
            keep = await checkpoint_queries.folders(db) | await sampler_queries.folders(db)
            for run in await run_queries.with_snapshots(db):
                keep |= {run.snapshot_folder or "", run.inflight_folder or ""}
            return keep

        keep = await self._db.read(folders)
        removed = self.rooms.checkpoints.storage.remove_all_but(keep)
        if removed:
            log.info("orphan_folders_removed", count=removed)


def create_app(
    settings: Settings,
    on_ready: Callable[[], None] = lambda: None,
    *,
    clock: Callable[[], float] = time.time,
    backends: Mapping[str, Sequence[Backend]] | None = None,
) -> FastAPI:
    """The ASGI application; its lifespan starts and stops the service."""
    settings.data.mkdir(parents=True, exist_ok=True)
    service = Service(settings, clock, backends)

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncGenerator[None]:
        starting = asyncio.create_task(service.start())
        loop = asyncio.get_running_loop()
        # A signal interrupts whatever is under way; the loop must be woken up for it.
        app.state.interrupt_start = lambda: loop.call_soon_threadsafe(starting.cancel)
        try:
            await _completed(starting)
        except (BackendError, StartRefused, CommandError) as error:
            app.state.failure = error
            await service.stop()
            raise
        on_ready()
        try:
            yield
        finally:
            await service.stop()

    app = FastAPI(title="Hearth", lifespan=lifespan)
    app.state.rooms = service.rooms
    app.state.failure = None
    app.state.interrupt_start = lambda: None
    errors.install(app)
    for part in _ROUTES:
        app.include_router(part.router, prefix="/api/v1")
    app.include_router(operators.router, prefix="/operator")
    oai.install(app)
    return app


def tokenizer_id(path: Path) -> str:
    """The folder, spelled so that the SDK hands it to transformers whole: it cuts an id at its
    first colon, and one with exactly two slashes after the second part."""
    text = str(path.resolve())
    return text.replace("/", "//", 1) if text.count("/") == 2 else text


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


async def _completed(starting: asyncio.Task[None]) -> None:
    """Raises StartRefused when somebody has cancelled it."""
    try:
        await starting
    except asyncio.CancelledError:
        raise StartRefused("stopped before it was ready") from None


async def _started(groups: Sequence[Backend]) -> ModelInfo:
    """Of the base model, once all its trainer groups are up. Raises BackendError: when one cannot
    start, the others need not."""
    try:
        async with asyncio.TaskGroup() as starting:
            infos = [starting.create_task(one.describe()) for one in groups]
    except ExceptionGroup as failed:
        raise failed.exceptions[0] from None
    return infos[0].result()
