"""On a GPU, where reading the weights once for all is the larger part of the gain: a model with
the shape of Qwen3-4B and random weights, in bfloat16."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch

from backends.contract import ForwardBackward
from backends.training.local import local_trainer
from backends.training.trainer import Trainer
from tests.benchmarks.loads import adapter, request, run_pass, step
from tests.benchmarks.measure import in_turn, wall_seconds
from tests.benchmarks.report import Row, ratio_row
from tests.benchmarks.scale import Scale
from tests.gpu.models import BILLIONS, random_model

TENANTS, TOKENS, RANK = 8, 256, 32


def rows(scale: Scale) -> Iterator[Row]:
    device = torch.device("cuda")
    trainer = local_trainer(random_model(BILLIONS, torch.bfloat16, device, made_on=device), 8192)
    tenants = [request(f"run{i}", [TOKENS], BILLIONS.vocab_size) for i in range(TENANTS)]
    for tenant in tenants:
        trainer.create(tenant.run, adapter(RANK))
    eight_s, one_s = in_turn([_pass(trainer, tenants), _pass(trainer, tenants[:1])], scale.rounds)
    yield ratio_row(
        "gpu-eight-tenants-over-one",
        f"on a GPU: {TENANTS} tenants x {TOKENS} tokens in one pass / 1 x {TOKENS}",
        eight_s,
        one_s,
        2.5,
    )


def _pass(trainer: Trainer, requests: Sequence[ForwardBackward]) -> Callable[[], float]:
    def finished_pass() -> None:
        run_pass(trainer, requests)
        torch.cuda.synchronize()

    def measured() -> float:
        taken = wall_seconds(finished_pass)
        # Untimed, so that every pass starts without a gradient, as one between steps does.
        step(trainer, requests)
        torch.cuda.synchronize()
        return taken

    return measured
