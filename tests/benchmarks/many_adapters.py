"""1,000 adapters of a tiny model, one step each in one tick, over one adapter with the same tokens.

Processor time of one thread, so that neighbours on the machine do not count.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import torch

from backends.contract import ForwardBackward
from backends.model import FrozenModel
from backends.training.local import local_trainer
from backends.training.trainer import Trainer
from server.settings import Settings
from tests.benchmarks.loads import adapter, request, run_pass, step
from tests.benchmarks.measure import in_turn, processor_seconds
from tests.benchmarks.report import Row, ratio_row
from tests.benchmarks.scale import Scale
from tests.tiny_models import VOCAB_SIZE, tiny_llama

ADAPTERS, TOKENS, RANK = 1000, 16, 8
MICROBATCH_TOKENS = Settings.model_fields["max_tokens_per_microbatch"].default


def rows(scale: Scale) -> Iterator[Row]:
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        model = FrozenModel.load(tiny_llama(Path(folder)), torch.float32, torch.device("cpu"))
    trainer = local_trainer(model, MICROBATCH_TOKENS)
    many = [request(f"run{index}", [TOKENS], VOCAB_SIZE) for index in range(ADAPTERS)]
    one = [request("run0", [TOKENS] * ADAPTERS, VOCAB_SIZE)]
    for wanted in many:
        trainer.create(wanted.run, adapter(RANK))
    many_s, one_s = in_turn([_tick(trainer, many), _tick(trainer, one)], scale.rounds)
    yield ratio_row(
        "thousand-adapters-over-one",
        f"1,000 adapters x {TOKENS} tokens, one step each in one tick / 1 adapter",
        many_s,
        one_s,
        3.0,
    )


def _tick(trainer: Trainer, requests: Sequence[ForwardBackward]) -> Callable[[], float]:
    def tick() -> None:
        run_pass(trainer, requests)
        step(trainer, requests)

    return lambda: processor_seconds(tick)
