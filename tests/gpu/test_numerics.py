"""The numbers of a device against those of the CPU in float32: outputs, gradients, steps.

Float32 must agree to rounding. In bfloat16 single numbers are rough, so means and directions are
compared.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from backends.contract import ForwardBackward, OptimStep
from backends.training.activations import Checkpointing
from backends.training.local import local_trainer
from tests.gpu.models import Shape, every_layer, random_model
from tests.unit.backends.material import (
    assert_close,
    gradient,
    run_good,
    sft,
    start_trained,
    weights,
)

CPU = torch.device("cpu")
RANKS = {"a": 16, "b": 16, "c": 8, "d": 64}
STEP = OptimStep(
    run="",
    learning_rate=1e-3,
    weight_decay=0.1,
    grad_clip_norm=10.0,
    # Well above rounding: where an entry of the gradient is as small, its last bits would show.
    eps=1e-3,
)


@dataclass(frozen=True, slots=True)
class Numbers:
    """What four runs get from three passes of mixed lengths, each with a step behind it."""

    logprobs: list[np.ndarray]
    """Of the first pass."""
    gradients: dict[str, Tensor]
    """Of the first pass."""
    moved: dict[str, Tensor]
    """The weights after the last step."""


Compute = Callable[[torch.dtype, torch.device, Checkpointing], Numbers]


def _requests(seed: int) -> list[ForwardBackward]:
    trained = [sft(run, [40, 40, 7], seed=seed + i) for i, run in enumerate("abd")]
    return [*trained, sft("c", [11], seed=seed + 9, backward=False), sft("c", [90], seed=seed)]


@pytest.fixture
def compute(small: Shape, tmp_path: Path) -> Compute:
    def run(dtype: torch.dtype, device: torch.device, checkpointing: Checkpointing) -> Numbers:
        model = random_model(small, dtype, device, made_on=CPU)
        trainer = local_trainer(model, 4096, checkpointing)
        for seed, (name, rank) in enumerate(RANKS.items()):
            start_trained(trainer, model, name, every_layer(rank, seed), tmp_path / name)
        results = run_good(trainer, *_requests(0))
        gradients = _by_run(lambda name: gradient(trainer, name, tmp_path / "gradient"))
        for seed in (100, 200):
            trainer.optim_step([replace(STEP, run=name) for name in RANKS])
            run_good(trainer, *_requests(seed))
        trainer.optim_step([replace(STEP, run=name) for name in RANKS])
        moved = _by_run(lambda name: weights(trainer, name, tmp_path / "weights"))
        return Numbers([o["logprobs"] for r in results for o in r.outputs], gradients, moved)

    return run


def _by_run(read: Callable[[str], dict[str, Tensor]]) -> dict[str, Tensor]:
    return {f"{run}.{name}": t for run in RANKS for name, t in read(run).items()}


@pytest.mark.parametrize("checkpointing", ["off", "on"])
def test_float32_agrees_with_the_cpu_to_rounding(compute, device, report, checkpointing):
    expected = compute(torch.float32, CPU, "off")
    got = compute(torch.float32, device, checkpointing)
    worst = max(
        float(np.abs(a - b).max()) for a, b in zip(got.logprobs, expected.logprobs, strict=True)
    )
    report(f"float32, checkpointing {checkpointing}: logprobs differ by {worst:.1e} at most")
    assert worst < 1e-4
    assert_close(got.gradients, expected.gradients, relative=1e-4)
    assert_close(got.moved, expected.moved, relative=1e-4)


@pytest.mark.parametrize("checkpointing", ["off", "on"])
def test_bfloat16_agrees_with_float32_by_mean_and_direction(compute, device, report, checkpointing):
    expected = compute(torch.float32, CPU, "off")
    got = compute(torch.bfloat16, device, checkpointing)
    pairs = zip(got.logprobs, expected.logprobs, strict=True)
    differences = np.concatenate([a - b for a, b in pairs])
    alike = _cosine(got.gradients, expected.gradients)
    moved = _cosine(got.moved, expected.moved)
    report(
        f"bfloat16, checkpointing {checkpointing}: logprobs differ by "
        f"{np.abs(differences).mean():.1e} on average, {differences.mean():+.1e} in the mean; "
        f"cosine of gradients {alike:.5f}, of weights {moved:.5f}"
    )
    assert np.abs(differences).mean() < 0.05
    assert abs(differences.mean()) < 0.01
    assert alike > 0.99
    assert moved > 0.999


def _cosine(got: dict[str, Tensor], expected: dict[str, Tensor]) -> float:
    a, b = (
        torch.cat([side[name].flatten().double() for name in expected]) for side in (got, expected)
    )
    return float(torch.cosine_similarity(a, b, dim=0))
