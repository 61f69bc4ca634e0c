"""One pass for many adapters, over what the same tokens cost otherwise. Design section 5.

Processor time of one thread, so that neighbours on the machine do not count.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial

import torch
from peft import PeftModel, get_peft_model

from backends.contract import ForwardBackward
from backends.model import FrozenModel
from backends.training.local import local_trainer
from backends.training.trainer import Trainer
from tests.benchmarks.loads import adapter, request, run_pass, step
from tests.benchmarks.measure import in_turn, processor_seconds
from tests.benchmarks.peft_model import load_base, lora_config, summed_loss
from tests.benchmarks.report import Row, ratio_row
from tests.benchmarks.scale import Scale

TENANTS, TOKENS, RANK = 8, 64, 32
MIXED = (4, 8, 16, 16, 32, 32, 64, 64)
EQUAL = (sum(MIXED) // len(MIXED),) * len(MIXED)


def rows(scale: Scale) -> Iterator[Row]:
    torch.set_num_threads(1)
    model = FrozenModel.load(scale.model, torch.float32, torch.device("cpu"))
    trainer = local_trainer(model, 8192)
    together = _tenants(trainer, "tenant", (RANK,) * TENANTS)
    alone = [request("tenant0", [TOKENS] * TENANTS, model.vocab_size)]
    shared, single, switched, mixed, equal = in_turn(
        [
            _pass(trainer, together),
            _pass(trainer, alone),
            _passes_with_peft(scale, together),
            _pass(trainer, _tenants(trainer, "mixed", MIXED)),
            _pass(trainer, _tenants(trainer, "equal", EQUAL)),
        ],
        scale.rounds,
    )
    yield ratio_row(
        "pass-over-one-tenant",
        "8 tenants x 64 tokens in one pass / 1 tenant x 512",
        shared,
        single,
        1.15,
    )
    yield ratio_row(
        "pass-over-switching",
        "8 tenants x 64 tokens in one pass / in turn, switched with PEFT",
        shared,
        switched,
        0.72,
    )
    yield ratio_row(
        "mixed-ranks-over-equal",
        "8 tenants with ranks 4..64 mixed / equal ranks of the same total",
        mixed,
        equal,
        1.15,
    )


def _tenants(trainer: Trainer, prefix: str, ranks: Sequence[int]) -> list[ForwardBackward]:
    for index, rank in enumerate(ranks):
        trainer.create(f"{prefix}{index}", adapter(rank))
    vocab_size = trainer.info().vocab_size
    return [request(f"{prefix}{index}", [TOKENS], vocab_size) for index in range(len(ranks))]


def _pass(trainer: Trainer, requests: Sequence[ForwardBackward]) -> Callable[[], float]:
    def measured() -> float:
        taken = processor_seconds(lambda: run_pass(trainer, requests))
        # Untimed, so that every pass starts without a gradient, as one between steps does.
        step(trainer, requests)
        return taken

    return measured


def _passes_with_peft(scale: Scale, requests: Sequence[ForwardBackward]) -> Callable[[], float]:
    """The same data, one adapter after the other on one model of PEFT's."""
    names = [request.run for request in requests]
    model = get_peft_model(load_base(scale.model), lora_config(RANK), adapter_name=names[0])
    for name in names[1:]:
        model.add_adapter(name, lora_config(RANK))

    def measured() -> float:
        taken = sum(processor_seconds(partial(_switched_pass, model, one)) for one in requests)
        model.zero_grad(set_to_none=True)
        return taken

    return measured


def _switched_pass(model: PeftModel, request: ForwardBackward) -> None:
    model.set_adapter(request.run)
    [datum] = request.data
    tokens = torch.from_numpy(datum.tokens)[None]
    targets = torch.from_numpy(datum.loss_inputs["target_tokens"])[None]
    summed_loss(model, tokens, targets).backward()
