"""A trainer for ranks that each hold the whole model; a run's name says what goes wrong."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Generator, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from backends.contract import BackendError, Contents, ForwardBackward, PassOutcome
from backends.model import FrozenModel
from backends.training.activations import Checkpointing
from backends.training.local import local_trainer
from backends.training.trainer import Trainer

TRAINER = "tests.unit.workers.rehearsed"


def load(
    path: str,
    *,
    dtype: torch.dtype,
    device: torch.device,
    max_tokens_per_microbatch: int,
    activation_checkpointing: Checkpointing,
    device_run_bytes: int | None,
    **layout: Any,
) -> Any:
    if layout:
        raise ValueError(f"cannot be divided as {layout}")
    model = FrozenModel.load(path, dtype, device)
    return _Rehearsed(
        local_trainer(model, max_tokens_per_microbatch, activation_checkpointing, device_run_bytes)
    )


class _Rehearsed:
    def __init__(self, trainer: Trainer) -> None:
        self._trainer = trainer

    def __getattr__(self, name: str) -> Any:
        return getattr(self._trainer, name)

    def forward_backward(
        self, requests: Sequence[ForwardBackward]
    ) -> Generator[None, None, list[PassOutcome]]:
        _play(requests[0].run)
        dist.barrier()
        return self._trainer.forward_backward(requests)

    def save(self, run: str, directory: str | Path, contents: Contents) -> int:
        return self._trainer.save(run, directory, contents) if dist.get_rank() == 0 else 0


def _play(run: str) -> None:
    if dist.get_rank() == 0:
        if run == "all-break":
            raise BackendError("as rehearsed, in rank 0")
        return
    match run:
        case "all-break" | "one-breaks":
            raise BackendError("as rehearsed")
        case "one-dies":
            os.kill(os.getpid(), signal.SIGKILL)
        case "one-hangs":
            time.sleep(600)
