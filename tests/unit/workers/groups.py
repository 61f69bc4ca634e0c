"""Groups of two ranks for tests, and work for them."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import numpy as np
import psutil

from backends.contract import (
    AdapterSpec,
    Datum,
    ForwardBackward,
    LossResult,
    OptimStep,
    StepResult,
)
from backends.workers.commands import trainer_group
from backends.workers.subprocess import SubprocessBackend
from tests.tiny_models import VOCAB_SIZE
from tests.unit.workers.rehearsed import TRAINER

SPEC = AdapterSpec(rank=4, alpha=8.0, seed=1, train_attn=True, train_mlp=True, train_unembed=True)
COMMON: dict[str, Any] = {"dtype": "float32", "threads": 2, "max_tokens_per_microbatch": 64}


class Group:
    """A backend, its log, and all processes of it."""

    def __init__(self, backend: SubprocessBackend, log: Path) -> None:
        self.backend = backend
        self.log = log
        coordinator = psutil.Process(backend.pid)
        self.ranks = coordinator.children()
        self.processes = [coordinator, *coordinator.children(recursive=True)]

    @classmethod
    async def start(cls, model_path: Path, folder: Path, **options: Any) -> Group:
        command = trainer_group(model_path, trainer=TRAINER, world_size=2, **COMMON, **options)
        log = folder / "group.log"
        return cls(await SubprocessBackend.start(command, log), log)

    async def ended(self) -> bool:
        """Whether all processes are gone, some seconds from now at the latest."""
        _, alive = await asyncio.to_thread(psutil.wait_procs, self.processes, timeout=20)
        return all(process.status() == psutil.STATUS_ZOMBIE for process in alive)


def work(run: str) -> ForwardBackward:
    tokens = np.random.default_rng(0).integers(0, VOCAB_SIZE, 30)
    inputs = {"target_tokens": np.roll(tokens, -1), "weights": np.ones(30, np.float32)}
    datum = Datum(tokens=tokens, loss_inputs=inputs)
    return ForwardBackward(run=run, data=(datum, datum), loss="cross_entropy")


async def trained(backend: SubprocessBackend, run: str) -> list[float]:
    """The losses of three steps of a new run."""
    await backend.create(run, SPEC)
    losses = []
    for _ in range(3):
        (result,) = await backend.forward_backward([work(run)])
        assert isinstance(result, LossResult)
        losses.append(result.metrics["loss:sum"])
        (step,) = await backend.optim_step([OptimStep(run=run, learning_rate=0.02)])
        assert isinstance(step, StepResult)
    return losses
