"""Requests for a trainer without a service around it."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from backends.contract import AdapterSpec, Datum, ForwardBackward, OptimStep
from backends.training.trainer import Trainer


def adapter(rank: int) -> AdapterSpec:
    """Every target, as the SDK asks for when it is not told otherwise."""
    return AdapterSpec(
        rank=rank, alpha=float(rank), seed=0, train_attn=True, train_mlp=True, train_unembed=True
    )


def request(run: str, lengths: Sequence[int], vocab_size: int) -> ForwardBackward:
    """Random datums of so many tokens each, all of weight 1; the same for the same lengths."""
    rng = np.random.default_rng(0)
    data = []
    for length in lengths:
        tokens = rng.integers(0, vocab_size, length + 1)
        inputs = {"target_tokens": tokens[1:].copy(), "weights": np.ones(length, np.float32)}
        data.append(Datum(tokens=tokens[:-1].copy(), loss_inputs=inputs))
    return ForwardBackward(run=run, data=tuple(data), loss="cross_entropy")


def run_pass(trainer: Trainer, requests: Sequence[ForwardBackward]) -> None:
    """One forward_backward of all of them, to its end."""
    for _ in trainer.forward_backward(requests):
        pass


def step(trainer: Trainer, requests: Sequence[ForwardBackward]) -> None:
    """An optimizer step of each run, which also clears its gradient."""
    trainer.optim_step([OptimStep(run=request.run, learning_rate=1e-4) for request in requests])
