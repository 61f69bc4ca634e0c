"""One seeded story of several tenants, played by any trainer: alone, or by the ranks of a group."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch
import torch.distributed as dist

from backends.contract import (
    AdapterSpec,
    Datum,
    Failure,
    ForwardBackward,
    LossResult,
    OptimStep,
    PassOutcome,
    StepResult,
)
from backends.training.trainer import Trainer
from tests.unit.backends.material import run_all, run_good, sft, spec

NUM_STEPS = 5
RUNS: dict[str, AdapterSpec] = {
    "small": spec(rank=2, seed=1),
    "large": spec(rank=8, seed=2, groups="attn mlp"),
    "head": spec(rank=4, seed=3, groups="unembed"),
    "attention": spec(rank=4, seed=4, groups="attn"),
}
_HYPER = {"small": 0.0, "large": 0.5, "head": 0.0, "attention": 1.0}
"""Clipping."""


class Told(msgspec.Struct):
    """What the story gave, by run."""

    logprobs: dict[str, list[list[float]]]
    losses: dict[str, list[float]]
    norms: dict[str, list[float]]
    failure: str
    base_bytes: list[int]
    """Of the base model, by rank."""
    memory: int = 0
    """Of one run, on all ranks."""


def play(trainer: Trainer, folder: Path) -> Told:
    """Train all runs for some steps, each pass with all of them; save them in `folder`; and see
    that a request which fails takes nothing with it."""
    told = Told(
        {run: [] for run in RUNS}, {run: [] for run in RUNS}, {run: [] for run in RUNS}, "", []
    )
    for run, run_spec in RUNS.items():
        trainer.create(run, run_spec)
    for step in range(NUM_STEPS):
        bad = _bad("small", step)
        *results, failure = run_all(trainer, [*_requests(step), bad])
        assert isinstance(failure, Failure), failure
        told.failure = failure.message
        _note(told, results)
        steps = [OptimStep(run=r, learning_rate=1e-2, grad_clip_norm=c) for r, c in _HYPER.items()]
        for run, stepped in zip(_HYPER, trainer.optim_step(steps), strict=True):
            assert isinstance(stepped, StepResult), stepped
            told.norms[run].append(stepped.metrics["grad_norm"])
    run_good(trainer, *_requests(NUM_STEPS))
    for run in RUNS:
        trainer.save(run, folder / run, "snapshot")
    told.memory = trainer.memory().runs["small"].total
    return told


def _requests(step: int) -> list[ForwardBackward]:
    """Of every run, in lengths that do not divide evenly; two of one run, one forward only."""
    seed = 100 * step
    return [
        sft("small", [7, 19, 5], seed),
        sft("large", [33], seed + 10),
        sft("head", [11, 3], seed + 20),
        sft("attention", [13] * 4, seed + 30),
        sft("small", [9], seed + 40),
        sft("large", [6, 6], seed + 50, backward=False),
    ]


def _bad(run: str, seed: int) -> ForwardBackward:
    """Its loss is not finite."""
    request = sft(run, [8, 4], 1000 + seed)
    weights = np.full(4, np.inf, np.float32)
    last = Datum(
        tokens=request.data[1].tokens,
        loss_inputs={**request.data[1].loss_inputs, "weights": weights},
    )
    return replace(request, data=(request.data[0], last))


def _note(told: Told, results: list[PassOutcome]) -> None:
    for request, result in zip(_requests(0), results, strict=True):
        assert isinstance(result, LossResult), result
        told.losses[request.run].append(result.metrics["loss:sum"])
        told.logprobs[request.run] += [one["logprobs"].tolist() for one in result.outputs]


def play_in_group(
    load: Callable[..., Trainer], model: Path, world_size: int, folder: Path, **options: Any
) -> Told:
    """The story in as many processes on gloo, as rank 0 tells it."""
    folder.mkdir(parents=True)
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([load.__module__, __name__])
    ranks = [
        context.Process(target=_rank, args=(rank, world_size, load, model, folder, options))
        for rank in range(world_size)
    ]
    for rank in ranks:
        rank.start()
    for rank in ranks:
        rank.join()
    assert [rank.exitcode for rank in ranks] == [0] * world_size
    return msgspec.json.decode((folder / "told.json").read_bytes(), type=Told)


def _rank(
    rank: int,
    world_size: int,
    load: Callable[..., Trainer],
    model: Path,
    folder: Path,
    options: dict[str, Any],
) -> None:
    torch.set_num_threads(1)
    store = dist.FileStore(str(folder / "store"), world_size)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size)
    trainer = load(
        model,
        dtype=torch.float32,
        device=torch.device("cpu"),
        max_tokens_per_microbatch=32,
        **options,
    )
    told = play(trainer, folder)
    told.base_bytes = trainer._ranks.exchange(trainer._model.num_bytes)
    if rank == 0:
        (folder / "told.json").write_bytes(msgspec.json.encode(told))
    dist.destroy_process_group()
