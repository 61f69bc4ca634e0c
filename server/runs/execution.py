"""Carrying out what the scheduler chose: one tick in, one outcome a job.

An outcome may bring more to commit with it (a checkpoint's row, a sampler's): what a client can
see of a request appears together, or not at all.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from backends.contract import (
    Failure,
    ForwardBackward,
    LossResult,
    OptimStep,
    Partial,
    PassOutcome,
    StepResult,
    TrainingBackend,
)
from server.checkpoints.encryption import encrypt_folder
from server.checkpoints.service import Checkpoints
from server.core.errors import ServiceError
from server.core.ids import sampling_session_id
from server.core.paths import CheckpointKind, CheckpointPath
from server.core.records import SamplerKind, SamplingSession
from server.core.requests import Job, Slice
from server.core.schedule import Tick
from server.runs import queries
from server.runs.operations import Create, Load, Operation, Publish, SaveCheckpoint
from server.runs.parts import part
from server.runs.registry import LiveRun, Registry
from server.runs.service import adapter_spec
from server.samplers import queries as sampler_queries
from server.store.database import AsyncSession
from server.store.ledger import Also, Outcome
from server.wire.loss_results import encode_loss_result

JSON = "application/json"
PROTOBUF = "application/x-protobuf"


@dataclass(frozen=True, slots=True)
class Executed:
    """What came of a job, and what is to be committed with it."""

    job: Job
    outcome: Outcome
    also: Also | None = None
    after: Callable[[], None] | None = None
    """To be called once that is committed."""
    replaces_state: bool = False
    """The run cannot be brought here again by playing its journal: it needs a snapshot."""


class Execution:
    def __init__(
        self,
        backend: TrainingBackend,
        registry: Registry,
        checkpoints: Checkpoints,
        clock: Callable[[], float],
    ) -> None:
        self._backend = backend
        self._registry = registry
        self._checkpoints = checkpoints
        self._clock = clock

    async def run(self, tick: Tick) -> list[Executed]:
        """What came of the jobs that end with this tick; the others go on. Raises BackendError when
        the backend failed; then no outcome is known."""
        first = self._operation(tick.jobs[0])
        if isinstance(first, ForwardBackward):
            return await self._passes(tick.slices)
        if isinstance(first, OptimStep):
            return await self._steps(tick.jobs)
        return [await self._single(tick.jobs[0], first)]

    def _operation(self, job: Job) -> Any:
        return self._registry.known(job.run).pending[job.request].operation

    async def _passes(self, slices: Sequence[Slice]) -> list[Executed]:
        parts = [part(self._operation(one.job), one.first, one.last) for one in slices]
        results = await self._backend.forward_backward(parts)
        return [
            Executed(one.job, _outcome(result))
            for one, result in zip(slices, results, strict=True)
            if not _goes_on(one, result)
        ]

    async def _steps(self, jobs: Sequence[Job]) -> list[Executed]:
        results = await self._backend.optim_step([self._operation(job) for job in jobs])
        return [Executed(job, _outcome(r)) for job, r in zip(jobs, results, strict=True)]

    async def _single(self, job: Job, operation: Operation) -> Executed:
        live = self._registry.known(job.run)
        try:
            match operation:
                case Create():
                    return await self._create(job, live)
                case Load():
                    return await self._load(job, live, operation)
                case SaveCheckpoint():
                    return await self._save(job, live, operation)
                case Publish():
                    return await self._publish(job, live, operation)
        except ServiceError as error:
            return Executed(job, Outcome(error=str(error), error_category=error.category))
        raise AssertionError(operation)

    async def _create(self, job: Job, live: LiveRun) -> Executed:
        await self._backend.create(live.run.id, adapter_spec(live.run.lora))
        return Executed(job, _json(type="create_model", model_id=live.run.id))

    async def _load(self, job: Job, live: LiveRun, load: Load) -> Executed:
        source = await self._checkpoints.readable(job.tenant, load.path)
        mine = live.run
        if source.base_model != mine.base_model:
            return _refused(
                job, f"checkpoint {load.path} is of {source.base_model}, not {mine.base_model}"
            )
        if source.lora.rank != mine.lora.rank or _flags(source.lora) != _flags(mine.lora):
            return _refused(
                job,
                f"checkpoint {load.path} has rank {source.lora.rank} and {_flags(source.lora)}; "
                f"this run has rank {mine.lora.rank} and {_flags(mine.lora)}",
            )
        if load.optimizer and source.optimizer != mine.optimizer:
            return _refused(
                job,
                f"checkpoint {load.path} holds the state of {source.optimizer}; this run's "
                f"optimizer is {mine.optimizer}",
            )
        await self._backend.load(
            mine.id,
            self._checkpoints.storage.path(source.folder),
            "optimizer" if load.optimizer else "adapter",
        )
        outcome = _json(type="load_weights", path=str(load.path), model_id=mine.id)
        return Executed(job, outcome, replaces_state=True)

    async def _save(self, job: Job, live: LiveRun, save: SaveCheckpoint) -> Executed:
        path = CheckpointPath(live.run.id, save.kind, save.name)
        standing = await self._checkpoints.find(path)
        if standing is not None and not save.overwrite:
            return _refused(job, f"checkpoint {path} exists already; choose another name")
        folder, size = await self._write(live, save)
        record = self._checkpoints.describe(
            live.run,
            path,
            folder=folder,
            size_bytes=size,
            ttl_seconds=save.ttl_seconds,
            user_metadata=save.user_metadata,
        )

        async def put(db: AsyncSession) -> None:
            await self._checkpoints.store(db, record)

        def forget_standing() -> None:
            if standing is not None:
                self._checkpoints.retire(standing.folder)

        return Executed(job, _saved(save.kind, path, size), also=put, after=forget_standing)

    async def _write(self, live: LiveRun, save: SaveCheckpoint) -> tuple[str, int]:
        """A new folder with the run's weights, and its size. Of weights for certain recipients
        only what they can decrypt stays on disk."""
        storage = self._checkpoints.storage
        folder = storage.new()
        contents = "optimizer" if save.kind is CheckpointKind.TRAINING else "adapter"
        size = await self._backend.save(live.run.id, storage.path(folder), contents)
        if not save.recipients:
            return folder, size
        encrypted = storage.new()
        try:
            size = await encrypt_folder(
                Path(storage.path(folder)), Path(storage.path(encrypted)), save.recipients
            )
        finally:
            await asyncio.to_thread(storage.remove, folder)
        return encrypted, size

    async def _publish(self, job: Job, live: LiveRun, publish: Publish) -> Executed:
        assert live.run.session_id is not None
        folder = self._checkpoints.storage.new()
        await self._backend.save(live.run.id, self._checkpoints.storage.path(folder), "adapter")
        inflight = publish.kind is SamplerKind.INFLIGHT
        sampler = SamplingSession(
            id=sampling_session_id(live.run.session_id, publish.sampling_session_seq_id),
            session_id=live.run.session_id,
            owner=live.run.owner,
            base_model=live.run.base_model,
            kind=publish.kind,
            created_at=self._clock(),
            run_id=live.run.id,
            folder=None if inflight else folder,
        )

        async def add(db: AsyncSession) -> None:
            await sampler_queries.add(db, sampler)
            if inflight:
                await queries.change(db, live.run.id, inflight_folder=folder)

        def point_at_it() -> None:
            if inflight:
                self._checkpoints.retire(live.run.inflight_folder)
                self._registry.show_inflight(live, folder)

        outcome = _json(type="save_weights_for_sampler", sampling_session_id=sampler.id)
        return Executed(job, outcome, also=add, after=point_at_it)


def _goes_on(one: Slice, result: PassOutcome) -> bool:
    """A part that failed ends its request."""
    assert isinstance(result, Failure) or isinstance(result, Partial) == one.more, result
    return isinstance(result, Partial)


def _outcome(result: PassOutcome | StepResult) -> Outcome:
    match result:
        case LossResult():
            return Outcome(result=encode_loss_result(result), result_type=PROTOBUF)
        case StepResult(metrics=metrics):
            return _json(metrics=metrics)
        case Failure(message=message, category=category):
            return Outcome(error=message, error_category=category)
        case Partial():
            raise AssertionError("a part has no outcome")


def _saved(kind: CheckpointKind, path: CheckpointPath, size_bytes: int) -> Outcome:
    match kind:
        case CheckpointKind.TRAINING:
            return _json(type="save_weights", path=str(path))
        case CheckpointKind.SAMPLER:
            return _json(type="save_weights_for_sampler", path=str(path))
        case CheckpointKind.EXTERNAL:
            return _json(type="save_weights_external", path=str(path), size_bytes=size_bytes)


def _json(**body: Any) -> Outcome:
    return Outcome(result=json.dumps(body).encode(), result_type=JSON)


def _refused(job: Job, why: str) -> Executed:
    return Executed(job, Outcome(error=why, error_category="user"))


def _flags(lora: Any) -> str:
    names = ("train_attn", "train_mlp", "train_unembed")
    return ", ".join(f"{name}={getattr(lora, name)}" for name in names)
