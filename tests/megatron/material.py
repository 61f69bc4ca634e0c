"""Layouts, and the same short ways to drive a trainer of several processes as of one."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from safetensors.torch import load_file
from torch import Tensor

from backends.contract import ForwardBackward, LossResult, PassOutcome
from tests.megatron.group import Group, first

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
