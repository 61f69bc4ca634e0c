"""Times and memory of passes over a large model: printed, never asserted."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import numpy as np
import pytest
import torch

from backends.contract import Datum, ForwardBackward, OptimStep
from backends.model import FrozenModel
from backends.training.activations import bytes_per_token
from backends.training.local import local_trainer
from backends.training.trainer import Trainer
from server.planning import memory
from server.planning.activations import PassShape
from server.planning.linears import GROUPS
from server.planning.memory import TrainerMemory, Workload
from server.planning.shapes import ModelShape
from tests.gpu.conftest import Report
from tests.gpu.models import Shape, every_layer, random_model
from tests.peak_memory import peak_bytes
from tests.unit.backends.material import run_good

RUNS = [f"run{i}" for i in range(8)]
ROUNDS = 5
RANK = 32
TARGET = 2.5
"""Design: 8 tenants x 256 tokens in one pass, over one tenant x 256, at most so many times."""


@pytest.fixture(scope="module")
def model(large: Shape, device: torch.device) -> Iterator[FrozenModel]:
    yield random_model(large, torch.bfloat16, device, made_on=device)
    if device.type == "cuda":
        torch.cuda.empty_cache()


def _trainer(model: FrozenModel, checkpointing: str) -> Trainer:
    trainer = local_trainer(model, 8192, checkpointing)
    for seed, run in enumerate(RUNS):
        trainer.create(run, every_layer(RANK, seed))
    return trainer


def _request(run: str, lengths: Sequence[int], vocab_size: int) -> ForwardBackward:
    rng = np.random.default_rng(0)
    data = tuple(
        Datum(
            tokens=rng.integers(0, vocab_size, length),
            loss_inputs={
                "target_tokens": rng.integers(0, vocab_size, length),
                "weights": np.ones(length, np.float32),
            },
        )
        for length in lengths
    )
    return ForwardBackward(run=run, data=data, loss="cross_entropy")


def _seconds(device: torch.device, call: Callable[[], object]) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    began = time.perf_counter()
    call()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - began


def _pass_seconds(trainer: Trainer, requests: Sequence[ForwardBackward]) -> float:
    """Median of some passes, each without a gradient from the one before."""
    device, taken = trainer._model.device, []
    for _ in range(ROUNDS + 1):
        taken.append(_seconds(device, lambda: run_good(trainer, *requests)))
        trainer.optim_step([OptimStep(run=r.run, learning_rate=0.0) for r in requests])
    return statistics.median(taken[1:])  # the first one warms up


def _planned(model: FrozenModel) -> TrainerMemory:
    """What `hearth doctor --plan` says of the same, for one run."""
    made = PassShape(dtype_bytes=model.dtype.itemsize, rank=RANK, groups=GROUPS)
    return memory.local(ModelShape.of(model._config.to_dict()), Workload(runs=1, made=made))


def _mebibytes(count: float) -> str:
    return f"{count / 2**20:,.1f} MiB"


def test_eight_tenants_in_one_pass(model: FrozenModel, report: Report):
    trainer = _trainer(model, "off")
    requests = [_request(run, [256], model.vocab_size) for run in RUNS]
    one, eight = _pass_seconds(trainer, requests[:1]), _pass_seconds(trainer, requests)
    report(f"one tenant x 256 tokens: {256 / one:,.0f} tokens/s")
    report(f"eight tenants x 256 tokens: {8 * 256 / eight:,.0f} tokens/s")
    report(f"eight over one: {eight / one:.2f} x the time; on a GPU {TARGET} x at most")


def test_memory_and_time_of_checkpointing(model: FrozenModel, report: Report):
    request = _request(RUNS[0], [1024] * 2, model.vocab_size)
    kept, recomputed = (_trainer(model, checkpointing) for checkpointing in ("off", "on"))
    adapter, planned = kept._runs[RUNS[0]].adapter, _planned(model)
    report(f"base model: {_mebibytes(model.num_bytes)}, reckoned {_mebibytes(planned.base)}")
    for name, trainer in (("kept", kept), ("recomputed", recomputed)):
        seconds = _pass_seconds(trainer, [request])
        per_token = bytes_per_token(model, adapter, recompute=trainer is recomputed)
        peak = peak_bytes(model.device, lambda t=trainer: run_good(t, request))
        reckoned = planned.in_pass + planned.activations(2048, recompute=trainer is recomputed)
        report(
            f"2,048 tokens, activations {name}: {2048 / seconds:,.0f} tokens/s, "
            f"peak {_mebibytes(peak)}, reckoned {_mebibytes(reckoned)} "
            f"and {_mebibytes(planned.logits)} at most for logits, "
            f"{per_token / 1000:,.0f} kB a token by count"
        )


def test_how_many_forward_only_tokens_are_worth_a_backward(model: FrozenModel, report: Report):
    """What `SHARED_FORWARD_TOKENS` holds for this device: the cost of a forward however short,
    over what a token's part of a backward costs (times are about linear in tokens)."""
    trainer = _trainer(model, "off")

    def line(backward: bool) -> tuple[float, float]:
        """Seconds of a pass however short, and of each token of it."""
        sizes = (64, 1024)
        requests = [
            replace(_request(RUNS[0], [n], model.vocab_size), backward=backward) for n in sizes
        ]
        short, long = (_pass_seconds(trainer, [request]) for request in requests)
        slope = (long - short) / (sizes[1] - sizes[0])
        return short - sizes[0] * slope, slope

    (fixed, forward), (_, both) = line(False), line(True)
    report(
        f"a forward costs {fixed * 1e3:.1f} ms and {forward * 1e6:.0f} us a token, a backward "
        f"{(both - forward) * 1e6:.0f} us a token more: they meet at {fixed / (both - forward):.0f}"
    )
