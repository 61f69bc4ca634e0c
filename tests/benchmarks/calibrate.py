"""Coefficients for `hearth simulate`: `python -m tests.benchmarks.calibrate models/ORG/NAME`.

Times passes and optimizer steps of the embedded trainer on one thread, in processor time so that
neighbours do not count, and fits the straight lines that `server/simulate/machines.py` holds.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch

from backends.contract import AdapterSpec, Datum, ForwardBackward, OptimStep
from backends.model import FrozenModel
from backends.training.local import local_trainer
from backends.training.trainer import Trainer

PASSES = ((1, 16), (1, 64), (1, 256), (1, 768), (8, 16), (8, 64), (16, 16))
"""(adapters, tokens of each); sequences are 64 tokens at most."""
RANKS = (8, 32)
SEQUENCE = 64


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", type=Path, help="folder in Hugging Face format")
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    torch.set_num_threads(1)
    model = FrozenModel.load(args.model, torch.float32, torch.device("cpu"))
    print(json.dumps(_coefficients(local_trainer(model, 1024), args.rounds), indent=2))


def _coefficients(trainer: Trainer, rounds: int) -> dict[str, float]:
    """Least squares over all shapes and ranks, each row weighted by 1 / its own seconds."""
    passes, steps = [], []
    for rank in RANKS:
        for adapters, tokens in PASSES:
            requests = [_request(trainer, f"{rank}-{i}", rank, tokens) for i in range(adapters)]
            pass_s, step_s = _measure(trainer, requests, rounds)
            passes.append(((1, adapters * tokens, adapters * rank), pass_s))
            steps.append(((adapters * rank,), step_s))
            print(f"rank {rank}, {adapters} x {tokens} tokens: {pass_s:.3f} s, {step_s:.4f} s")
    pass_fixed, per_token, per_rank = _fit(passes)
    [per_step_rank] = _fit(steps)
    return {
        "pass_s": pass_fixed,
        "token_s": per_token,
        "pass_rank_s": per_rank,
        "step_rank_s": per_step_rank,
    }


def _request(trainer: Trainer, run: str, rank: int, tokens: int) -> ForwardBackward:
    spec = AdapterSpec(
        rank=rank, alpha=32.0, seed=0, train_attn=True, train_mlp=True, train_unembed=True
    )
    trainer.create(run, spec)
    rng = np.random.default_rng(0)
    data = []
    for start in range(0, tokens, SEQUENCE):
        length = min(SEQUENCE, tokens - start)
        targets = rng.integers(0, trainer.info().vocab_size, length)
        inputs = {"target_tokens": targets, "weights": np.ones(length, np.float32)}
        data.append(Datum(tokens=targets, loss_inputs=inputs))
    return ForwardBackward(run=run, data=tuple(data), loss="cross_entropy")


def _measure(trainer: Trainer, requests: list[ForwardBackward], rounds: int) -> tuple[float, float]:
    """Median seconds of a pass, and of the steps of all its adapters."""
    steps = [OptimStep(run=request.run, learning_rate=0.0) for request in requests]
    passes, stepped = [], []
    for _ in range(rounds + 1):
        passes.append(_seconds(lambda: list(trainer.forward_backward(requests))))
        stepped.append(_seconds(lambda: trainer.optim_step(steps)))
    return statistics.median(passes[1:]), statistics.median(stepped[1:])  # the first warms up


def _seconds(call: Callable[[], object]) -> float:
    start = time.process_time()
    call()
    return time.process_time() - start


def _fit(rows: list[tuple[tuple[float, ...], float]]) -> list[float]:
    shapes, seconds = np.array([row[0] for row in rows], float), np.array([row[1] for row in rows])
    solution, *_ = np.linalg.lstsq(shapes / seconds[:, None], np.ones(len(rows)), rcond=None)
    return [float(f"{value:.3g}") for value in solution]


if __name__ == "__main__":
    main()
