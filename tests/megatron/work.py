"""What ranks do in tests: a trainer on one layout after another."""

from __future__ import annotations

from pathlib import Path

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from torch import Tensor

from backends.contract import Contents, ForwardBackward, OptimStep, PassOutcome
from backends.training.megatron.model import MegatronModel
from backends.training.megatron.parallel import Parallel
from backends.training.megatron.passes import megatron_trainer
from backends.training.trainer import Trainer

_trainers: dict[str, Trainer] = {}


def start(
    path: Path,
    parallel: Parallel,
    max_tokens: int = 4096,
    checkpointing: str = "off",
    dtype: torch.dtype = torch.float32,
) -> None:
    """In place of the trainer before."""
    if parallel_state.is_initialized():
        parallel_state.destroy_model_parallel()
    model = MegatronModel.load(path, dtype, parallel)
    _trainers["only"] = megatron_trainer(model, max_tokens, checkpointing)


def trainer() -> Trainer:
    return _trainers["only"]


def exported() -> dict[str, Tensor]:
    """The base model, from the first rank."""
    tensors = dict(trainer()._model.export())
    return tensors if dist.get_rank() == 0 else {}


def load(run: str, folder: Path, contents: Contents) -> None:
    trainer().load(run, folder, contents)


def save(run: str, folder: Path, contents: Contents) -> int:
    return trainer().save(run, folder, contents)


def forward_backward(requests: list[ForwardBackward]) -> list[PassOutcome]:
    generator = trainer().forward_backward(requests)
    while True:
        try:
            next(generator)
        except StopIteration as stop:
            return stop.value


def optim_step(steps: list[OptimStep]) -> list:
    return trainer().optim_step(steps)
