"""A training call as a trainer computes it."""

from __future__ import annotations

from collections.abc import Generator
from typing import assert_never

from backends.training.trainer import Trainer
from backends.workers import messages
from backends.workers.messages import Reply, TrainingCall

Units = Generator[None, None, Reply]
"""A training call in units of work that others may come between; it returns the reply."""


def units(trainer: Trainer, call: TrainingCall) -> Units:
    match call:
        case messages.RunForwardBackward(requests):
            return messages.losses((yield from trainer.forward_backward(requests)))
        case messages.RunOptimStep(steps):
            return messages.steps(trainer.optim_step(steps))
        case messages.Create(run, spec):
            trainer.create(run, spec)
        case messages.Save(run, directory, contents):
            return messages.Saved(trainer.save(run, directory, contents))
        case messages.Load(run, directory, contents):
            return messages.Loaded(trainer.load(run, directory, contents))
        case messages.Unload(run):
            trainer.unload(run)
        case messages.Memory():
            return messages.Remembered(trainer.memory())
        case messages.Describe():
            return messages.Described(trainer.info())
        case _:
            assert_never(call)
    return messages.Done()
