"""Layouts, and the same short ways to drive a trainer of several processes as of one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from backends.contract import Failure, ForwardBackward, LossResult, PassOutcome
from tests.megatron.group import Group, first
from tests.unit.backends.material import assert_close, sft, spec
from tests.unit.backends.oracle import logprobs, peft_model, trainable

_SEQUENCE = {"tensor_parallel": 2, "sequence_parallel": True}
LAYOUTS: dict[str, dict[str, int | bool]] = {
    "tensor 2, pipeline 2": {**_SEQUENCE, "pipeline_parallel": 2},
    "tensor 2, data 2": _SEQUENCE,
    "tensor 2, data 2, whole sequences": {"tensor_parallel": 2},
    "pipeline 2, data 2": {"pipeline_parallel": 2},
    "data 4": {},
}
"""Of four ranks."""
MAX_TOKENS = 64

SPECS = {
    "a": spec(rank=4, seed=1),
    "b": spec(rank=8, seed=2, groups="attn"),
    "c": spec(rank=3, seed=3, groups="unembed"),  # nothing on the first stage
    "d": spec(rank=4, seed=4),  # grouped with a
    "e": spec(rank=5, seed=5, groups="mlp"),
}
REQUESTS = [
    sft("a", [9, 20, 9, 13], seed=1),
    sft("b", [4, 31], seed=2),
    sft("c", [17, 3, 8], seed=3),
    sft("d", [30, 2, 11], seed=4),
    sft("e", [21, 7], seed=5, backward=False),
]


def run_all(group: Group, requests: Sequence[ForwardBackward]) -> list[PassOutcome]:
    return first(group.call("forward_backward", list(requests)))


def run_good(group: Group, *requests: ForwardBackward) -> list[LossResult]:
    results = run_all(group, requests)
    for result in results:
        assert isinstance(result, LossResult), result
    return [result for result in results if isinstance(result, LossResult)]


def gradient(group: Group, run: str, folder: Path) -> dict[str, Tensor]:
    """What waits for the run's next step."""
    group.call("save", run, folder, "snapshot")
    return load_file(folder / "gradients.safetensors")


def expected_alone(
    base: Path, adapter: Path, request: ForwardBackward
) -> tuple[list[Tensor], dict[str, Tensor]]:
    """In peft, in float64: each datum's target log-probabilities, and the gradients of the summed
    loss."""
    model = peft_model(base, adapter)
    rows, loss = [], torch.zeros((), dtype=torch.float64)
    for datum in request.data:
        tokens, targets = (
            torch.from_numpy(ids) for ids in (datum.tokens, datum.loss_inputs["target_tokens"])
        )
        rows.append(logprobs(model, tokens, targets))
        loss = loss - (rows[-1] * torch.from_numpy(datum.loss_inputs["weights"])).sum()
    loss.backward()
    gradients = {name: p.grad for name, p in trainable(model).items() if p.grad is not None}
    return [row.detach() for row in rows], gradients


def assert_nan_stays_with_its_run(
    group: Group, start: Callable[[], None], adapters: dict[str, Path], tmp_path: Path
) -> None:
    """Run b gets weights that are not numbers: it fails, and the others are as without it. `start`
    makes a trainer that has the adapters."""
    start()
    run_good(group, *(request for request in REQUESTS if request.run != "b"))
    expected = {run: gradient(group, run, tmp_path / "g") for run in "acd"}
    start()
    file = adapters["b"] / "adapter_model.safetensors"
    save_file({name: t.fill_(torch.nan) for name, t in load_file(file).items()}, file)
    group.call("load", "b", adapters["b"], "adapter")
    results = dict(zip("abcde", run_all(group, REQUESTS), strict=True))
    failure = results.pop("b")
    assert isinstance(failure, Failure)
    assert failure.message.startswith("datum 0: the logprob at position 0 is nan")
    assert all(isinstance(result, LossResult) for result in results.values())
    assert gradient(group, "b", tmp_path / "g") == {}
    for run, wanted in expected.items():
        assert_close(gradient(group, run, tmp_path / "g"), wanted, relative=1e-6)
