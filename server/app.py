"""The composition root: builds the rooms and joins them. The only place in the server that names
a concrete backend."""

from __future__ import annotations

import asyncio
import ipaddress
import os
import secrets
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Protocol

import structlog
from alembic.util import CommandError
from fastapi import FastAPI

from backends.contract import (
    BackendError,
    MemoryReport,
    ModelInfo,
    SamplingEngine,
    SamplingFleet,
)
from backends.sampling.vllm.assemble import assemble
from backends.sampling.vllm.launch import LaunchSettings
from backends.workers.subprocess import SAMPLES_AT_ONCE, SubprocessBackend
from backends.workers.supervised import SupervisedBackend
from server import engine_urls
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
from server.api.rooms import Progress, Rooms
from server.audit.service import Audit
from server.catalogue import Catalogue, ServedModel
from server.checkpoints import queries as checkpoint_queries
from server.checkpoints.downloads import Downloads, load_secret
from server.checkpoints.service import Checkpoints
from server.checkpoints.storage import Storage
from server.core.ids import TenantId
from server.core.records import Run
from server.dispatch.choosing import DispatchSettings
from server.dispatch.device import Restartable
from server.dispatch.dispatcher import Dispatcher
from server.housekeeping import Housekeeping
from server.losses.service import Check, CustomLosses
from server.oai.bills import Bills
from server.oai.models import Models
from server.oai.service import OpenAI
from server.replicas import Replicas
from server.runs import queries as run_queries
from server.runs.service import Runs
from server.samplers import queries as sampler_queries
from server.samplers.gate import Gate
from server.samplers.inflight import InflightWeights
from server.samplers.service import Samplers
from server.settings import Settings, has_gpu
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
        backends: Mapping[str, Backend] | None = None,
        fleets: Mapping[str, SamplingFleet] | None = None,
    ) -> None:
        """`backends` stand in for the workers that the settings would start, `fleets` for the vLLM
        replicas."""
        self._settings = settings
        self._db = Database(settings.database_url or sqlite_url(settings.data / "hearth.db"))
        self._catalogue = Catalogue()
        self._backends: Mapping[str, Backend] = backends or {
            name: SupervisedBackend(_worker(settings, name, path))
            for name, path in settings.models.items()
        }
        self._fleets: dict[str, SamplingFleet] = dict(fleets or {})
        self._engines: dict[str, SamplingEngine] = {**self._backends, **self._fleets}
        self._gates = _gates(settings, self._backends)
        self._dispatchers: dict[str, Dispatcher] = {}
        self._tasks: list[asyncio.Task[None]] = []
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
        if (why := engine_urls.refusal(self._settings, len(self._backends))) is not None:
            raise StartRefused(why)
        for name in self._backends:
            await self._start_model(name)
        await self._remove_orphans()
        unfinished = await self.rooms.ledger.start()
        await self.rooms.runs.resume(unfinished)
        await self.rooms.samplers.resume(unfinished)
        for dispatcher in self._dispatchers.values():
            self._tasks.append(asyncio.create_task(dispatcher.run()))
        housekeeping = Housekeeping(self.rooms)
        self._housekeeping = asyncio.create_task(housekeeping.run())

    async def _start_model(self, name: str) -> None:
        info = _limited(await self._backends[name].describe(), self._settings)
        if self._settings.engine == "vllm":
            names = _replica_names(self._settings, list(self._backends).index(name))
            if name not in self._fleets:
                self._fleets[name] = _vllm(self._settings, name, info, names)
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
        for dispatcher in self._dispatchers.values():
            dispatcher.stop()
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=self._settings.drain_grace_s)
        await self.rooms.samplers.drain()
        await self.rooms.oai.stop()
        await self.rooms.traces.stop()
        await asyncio.gather(*(fleet.stop() for fleet in self._fleets.values()))
        for backend in self._backends.values():
            await backend.stop(grace_s=5.0)
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
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
            wake=lambda model: self._dispatchers[model].wake(),
            refuse_stable_reinforce=settings.stable_reinforce == "refuse",
        )
        for name, backend in self._backends.items():
            self._dispatchers[name] = Dispatcher(
                base_model=name,
                backend=backend,
                registry=runs.registry,
                checkpoints=checkpoints_room,
                ledger=ledger,
                settings=DispatchSettings(
                    token_budget=settings.tick_token_budget,
                    gap_wait_s=settings.gap_wait_s,
                    snapshot_after_s=settings.snapshot_after_s,
                    run_memory_bytes=settings.run_memory_bytes // len(self._backends),
                    tenant_weights=_tenant_weights(settings),
                ),
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
            free=self._free,
            memory=self._memory,
            replicas=Replicas(self._fleets, ledger.wake_all),
            hold=self._hold,
            progress=self._progress,
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
        return {name: backend.check_loss for name, backend in self._backends.items()}

    def _build_oai(
        self, samplers: Samplers, checkpoints_room: Checkpoints, clock: Callable[[], float]
    ) -> OpenAI:
        return OpenAI(
            models=Models(self._catalogue, checkpoints_room, self._settings.models),
            samplers=samplers,
            bills=Bills(self._db, clock),
            clock=clock,
        )

    def _free(self, run: Run) -> None:
        # A run of a model that is not served any more has nothing to free.
        if dispatcher := self._dispatchers.get(run.base_model):
            dispatcher.release([run.id])

    async def _memory(self) -> Mapping[str, MemoryReport]:
        return {name: await backend.memory() for name, backend in self._backends.items()}

    def _hold(self, on: bool) -> None:
        for one in (*self._dispatchers.values(), *self._gates.values()):
            if on:
                one.hold()
            else:
                one.let_go()

    def _progress(self) -> Mapping[str, Progress]:
        return {
            name: Progress(ticks=dispatcher.ticks, tokens=dispatcher.tokens)
            for name, dispatcher in self._dispatchers.items()
        }

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
    backends: Mapping[str, Backend] | None = None,
) -> FastAPI:
    """The ASGI application; its lifespan starts and stops the service."""
    settings.data.mkdir(parents=True, exist_ok=True)
    service = Service(settings, clock, backends)

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncGenerator[None]:
        try:
            await service.start()
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


def _tenant_weights(settings: Settings) -> Mapping[TenantId, float]:
    return {TenantId(name): weight for name, weight in settings.tenant_weights.items()}


def _gates(settings: Settings, models: Iterable[str]) -> Mapping[str, Gate]:
    at_once = SAMPLES_AT_ONCE
    if settings.engine == "vllm":
        at_once = settings.engine_max_num_seqs * _num_replicas(settings)
    room = settings.max_running_samples or 2 * at_once
    return {name: Gate(room, _tenant_weights(settings)) for name in models}


def _limited(info: ModelInfo, settings: Settings) -> ModelInfo:
    longest = min(settings.max_context_length or info.max_context_length, info.max_context_length)
    rank = settings.engine_max_lora_rank if settings.engine == "vllm" else None
    return replace(info, max_context_length=longest, max_lora_rank=rank)


def _num_replicas(settings: Settings) -> int:
    return len(settings.engine_urls) or settings.engine_replicas


def _replica_names(settings: Settings, model: int) -> list[str]:
    """Of the base model with this number; no other has any of them."""
    count = _num_replicas(settings)
    return [f"replica-{model * count + i}" for i in range(count)]


def _vllm(settings: Settings, name: str, info: ModelInfo, replicas: Sequence[str]) -> SamplingFleet:
    launch = LaunchSettings(
        model=settings.models[name],
        python=settings.engine_python,
        max_model_len=info.max_context_length,
        dtype=settings.dtype,
        max_num_seqs=settings.engine_max_num_seqs,
        max_loras=settings.engine_max_loras,
        max_cpu_loras=max(settings.engine_max_cpu_loras, settings.engine_max_loras),
        max_lora_rank=settings.engine_max_lora_rank,
        kv_cache_bytes=settings.engine_kv_cache_bytes,
        on_cpu=not has_gpu(),
    )
    return assemble(
        launch, names=replicas, urls=settings.engine_urls, folder=settings.data / "logs"
    )


def _worker(
    settings: Settings, name: str, path: Path
) -> Callable[[], Awaitable[SubprocessBackend]]:
    logs = settings.data / "logs"

    async def start() -> SubprocessBackend:
        logs.mkdir(parents=True, exist_ok=True)
        return await SubprocessBackend.start(
            path,
            dtype=settings.dtype,
            device=settings.device,
            device_run_bytes=settings.device_run_bytes,
            threads=settings.threads or os.cpu_count() or 1,
            max_tokens_per_microbatch=settings.max_tokens_per_microbatch,
            activation_checkpointing=settings.activation_checkpointing,
            log_file=logs / f"worker-{name.replace('/', '--')}.log",
        )

    return start
