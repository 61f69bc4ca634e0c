"""What ranks do in tests."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from backends.contract import (
    AdapterSpec,
    Contents,
    Failure,
    ForwardBackward,
    MemoryReport,
    ModelInfo,
    OptimStep,
    PassOutcome,
    StepResult,
)
from backends.lora.adapter import Target
from backends.model import UnsupportedModelError
from backends.training.activations import Checkpointing
from backends.training.megatron.trainer import load as load_trainer
from backends.training.trainer import CallRefusedError, Trainer
from tests.unit.backends.together import Told, play

_trainers: list[Trainer] = []


def join(folder: Path, rank: int, num_ranks: int) -> None:
    """Become a rank of a group, all of whom know an empty folder."""
    init_method = f"file://{folder / 'store'}"
    dist.init_process_group("gloo", init_method=init_method, rank=rank, world_size=num_ranks)


def start(
    path: Path,
    layout: dict[str, Any],
    max_tokens: int,
    checkpointing: Checkpointing = "off",
    dtype: torch.dtype = torch.float32,
) -> None:
    """The trainer of these processes."""
    made = load_trainer(
        path,
        dtype=dtype,
        device=torch.device("cpu"),
        max_tokens_per_microbatch=max_tokens,
        activation_checkpointing=checkpointing,
        **layout,
    )
    _trainers[:] = [made]


def not_started(path: Path, layout: dict[str, Any]) -> str:
    """Why the model cannot be divided so."""
    try:
        start(path, layout, 64)
    except UnsupportedModelError as error:
        return str(error)
    raise AssertionError("it was loaded")


def exported() -> dict[str, Tensor]:
    """The base model, from the first rank; the others have a part in it."""
    tensors = dict(_trainers[0]._model.export())
    return tensors if dist.get_rank() == 0 else {}


def info() -> ModelInfo:
    return _trainers[0].info()


def targets() -> tuple[Target, ...]:
    return _trainers[0]._model.targets


def memory(run: str) -> tuple[int, int, MemoryReport]:
    """Bytes of the base model and of the run's weights on this rank, and what is reported of all
    ranks."""
    trainer = _trainers[0]
    own = trainer._runs[run].memory(trainer._model.device)
    return trainer._model.num_bytes, own.weights, trainer.memory()


def router_logits(hidden: Tensor) -> Tensor:
    """Of the first layer's experts, on the first stage."""
    return _trainers[0]._model.gpt.decoder.layers[0].mlp.router.gating(hidden)


def create(run: str, spec: AdapterSpec) -> None:
    _trainers[0].create(run, spec)


def load(run: str, folder: Path, contents: Contents) -> AdapterSpec:
    return _trainers[0].load(run, folder, contents)


def refused(run: str, folder: Path, contents: Contents) -> str:
    """Why the folder cannot be loaded."""
    try:
        load(run, folder, contents)
    except CallRefusedError as error:
        return str(error)
    raise AssertionError("it was loaded")


def unload(run: str) -> None:
    _trainers[0].unload(run)


def save(run: str, folder: Path, contents: Contents) -> int:
    return _trainers[0].save(run, folder, contents)


def forward_backward(requests: list[ForwardBackward]) -> list[PassOutcome]:
    generator = _trainers[0].forward_backward(requests)
    while True:
        try:
            next(generator)
        except StopIteration as stop:
            return stop.value


def optim_step(steps: list[OptimStep]) -> list[StepResult | Failure]:
    return _trainers[0].optim_step(steps)


def story(folder: Path) -> Told:
    """The seeded one of several tenants."""
    return play(_trainers[0], folder)
