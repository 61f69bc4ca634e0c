"""Which sizes to start with: the plainest layout of each backend that fits, beside vLLM."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from server.planning import engine, memory
from server.planning.engine import ReplicaMemory, Serving
from server.planning.layouts import possible
from server.planning.memory import Backend, TrainerMemory, Workload
from server.planning.shapes import ModelShape, PlanRefused
from server.planning.words import counted, gib

BACKENDS: tuple[Backend, ...] = ("local", "fsdp", "megatron")

MICROBATCHES = (8192, 4096, 2048, 1024)
"""Beyond the first a GPU gains nothing; below the last it waits for its own memory."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    gpus: int
    gpu_bytes: float
    """Of each."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """What is to be placed on a machine."""

    shape: ModelShape
    workload: Workload
    serving: Serving
    machine: Machine

    @property
    def dtype_bytes(self) -> int:
        return self.workload.made.dtype_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """A trainer with its microbatch, and what samples beside it."""

    trainer: TrainerMemory
    available: float
    """Bytes that the trainer may have of each of its GPUs."""
    tokens: int
    recompute: bool
    replica: ReplicaMemory | None
    """None: the embedded engine samples, from the trainer's own weights."""
    replicas: int
    share: float
    """Of its GPUs' memory that a replica takes."""
    shared: bool
    """Whether the trainer and the replica are on one GPU."""


def microbatch(trainer: TrainerMemory, available: float) -> tuple[int, bool] | None:
    """The most tokens that fit, and whether their layers are computed again. They are kept under
    the trainer's own rule, if they take up to half of what is free."""
    for tokens in MICROBATCHES:
        if tokens * trainer.kept_token <= (available - trainer.held) / 2:
            return tokens, False
    for tokens in MICROBATCHES:
        if trainer.total(tokens, recompute=True) <= available:
            return tokens, True
    return None


def place(task: Task, backend: Backend) -> Placement:
    """Raises PlanRefused when there is no way."""
    if task.shape.experts and backend != "megatron":
        raise PlanRefused(f"{backend}: mixture-of-experts models need the Megatron backend")
    if not _trainer_gpus(task, backend):
        raise PlanRefused(
            f"{backend}: with one GPU for the trainer it is the local backend, and more in the way"
        )
    found = _shared(task, backend) if task.machine.gpus == 1 else _beside_vllm(task, backend)
    if backend == "local":
        found = itertools.chain(found, _embedded(task))
    placement = next(iter(found), None)
    if placement is None:
        raise PlanRefused(_why_not(task, backend))
    return placement


def choose(task: Task) -> tuple[dict[Backend, Placement | PlanRefused], Backend | None]:
    """What each backend would do, and which of them to start with: beside vLLM if any can, on
    one trainer GPU the local one, on more the plainest of the others."""
    outcomes: dict[Backend, Placement | PlanRefused] = {}
    for backend in BACKENDS:
        try:
            outcomes[backend] = place(task, backend)
        except PlanRefused as refused:
            outcomes[backend] = refused
    order: Sequence[Backend] = ("fsdp", "megatron", "local") if task.machine.gpus > 3 else BACKENDS
    placed = {name: one for name in order if isinstance(one := outcomes[name], Placement)}
    beside = [name for name, one in placed.items() if one.replica is not None]
    return outcomes, next(iter([*beside, *placed]), None)


def _trainer_gpus(task: Task, backend: Backend) -> range:
    """How many GPUs the trainer may have beside vLLM: half of them, or more."""
    gpus = task.machine.gpus
    fewest = 1 if backend == "local" or task.shape.experts else 2
    if backend == "local" or gpus == 1:
        return range(fewest, 2)
    return range(max(fewest, gpus // 2), gpus)


def _shared(task: Task, backend: Backend) -> Iterator[Placement]:
    """The only GPU for both: half for vLLM, or as much less as leaves activations room."""
    gpu_bytes = task.machine.gpu_bytes
    one = engine.replica(task.shape, task.serving, task.dtype_bytes, 1)
    found = [
        placement
        for share in (0.5, 0.4, 0.3, 0.2)
        if one.least <= share * gpu_bytes
        for placement in _on(task, backend, 1, (1 - share) * gpu_bytes, one, share=share)
    ]
    yield from sorted(found, key=lambda placement: placement.recompute)


def _beside_vllm(task: Task, backend: Backend) -> Iterator[Placement]:
    """Half of the GPUs train, or as many more as it takes."""
    machine = task.machine
    for gpus in _trainer_gpus(task, backend):
        replica = engine.smallest_replica(
            task.shape,
            task.serving,
            task.dtype_bytes,
            gpus=machine.gpus - gpus,
            gpu_bytes=engine.LARGEST_SHARE * machine.gpu_bytes,
        )
        if replica is not None:
            yield from _on(task, backend, gpus, machine.gpu_bytes, replica)


def _embedded(task: Task) -> Iterator[Placement]:
    cache = engine.EMBEDDED_TOKENS * engine.kv_bytes(task.shape, task.dtype_bytes)
    yield from _on(task, "local", 1, task.machine.gpu_bytes - cache, None)


def _on(
    task: Task,
    backend: Backend,
    gpus: int,
    available: float,
    replica: ReplicaMemory | None,
    share: float = engine.LARGEST_SHARE,
) -> Iterator[Placement]:
    """The layouts on so many GPUs that fit: those that keep activations first."""
    fitting = [
        (trainer, fit)
        for trainer in _trainers(task, backend, gpus)
        if (fit := microbatch(trainer, available)) is not None
    ]
    shared = share != engine.LARGEST_SHARE
    rest = 1 if shared else task.machine.gpus - gpus
    for trainer, (tokens, recompute) in sorted(fitting, key=lambda one: one[1][1]):
        yield Placement(
            trainer=trainer,
            available=available,
            tokens=tokens,
            recompute=recompute,
            replica=replica,
            replicas=rest // replica.gpus if replica else 0,
            share=share,
            shared=shared,
        )


def _trainers(task: Task, backend: Backend, gpus: int) -> Iterable[TrainerMemory]:
    """The plainest first."""
    match backend:
        case "local":
            yield memory.local(task.shape, task.workload)
        case "fsdp":
            yield memory.fsdp(task.shape, task.workload, gpus)
        case "megatron":
            for sizes in possible(task.shape, gpus):
                yield memory.megatron(task.shape, task.workload, sizes)


def _why_not(task: Task, backend: Backend) -> str:
    smallest, workload = MICROBATCHES[-1], task.workload
    needs, gpus = min(
        (trainer.total(smallest, recompute=True), gpus)
        for gpus in _trainer_gpus(task, backend)
        for trainer in _trainers(task, backend, gpus)
    )
    least = engine.replica(task.shape, task.serving, task.dtype_bytes, 1).least
    return (
        f"{backend}: {counted(workload.runs, 'run')} of rank {workload.made.rank} would take "
        f"{gib(needs)} of {'each of ' if gpus > 1 else ''}{counted(gpus, 'GPU')}, and vLLM "
        f"{gib(least)}; {counted(task.machine.gpus, 'GPU')} of {gib(task.machine.gpu_bytes)} "
        "cannot hold both"
    )
