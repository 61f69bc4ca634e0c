"""A mixture of experts, divided in every way, against peft in float64."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM

from backends.contract import LossResult
from backends.lora.adapter import UNEMBED, Adapter, LoRAPair, Target, fresh_adapter
from backends.lora.peft_folder import save_adapter
from tests.megatron.material import (
    MAX_TOKENS,
    REQUESTS,
    SPECS,
    expected_alone,
    gradient,
    run_good,
)
from tests.tiny_models import tiny_qwen3_moe
from tests.unit.backends.material import assert_close

LAYOUTS: dict[str, dict[str, int | bool]] = {
    "expert 2, data 4": {"expert_parallel": 2},
    "expert 4": {"expert_parallel": 4},
    "expert 2, tensor 2": {"expert_parallel": 2, "tensor_parallel": 2, "sequence_parallel": True},
    "expert 2, pipeline 2": {"expert_parallel": 2, "pipeline_parallel": 2},
    "data 4": {},
}
"""Of four ranks."""


@pytest.fixture(scope="module")
def moe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_qwen3_moe(tmp_path_factory.mktemp("moe"))


def targets_of(base: Path) -> tuple[Target, ...]:
    """What peft could adapt in the original, in its order: all linear layers but the router."""
    found = []
    for name, module in AutoModelForCausalLM.from_pretrained(base).named_modules():
        if isinstance(module, nn.Linear) and not name.endswith("mlp.gate"):
            group = "attn" if "self_attn" in name else "unembed" if name == UNEMBED else "mlp"
            found.append(Target(name, group, module.in_features, module.out_features))
    return tuple(found)


def save_trained(base: Path, folder: Path) -> dict[str, Path]:
    """For each of SPECS an adapter whose B is not zero any more."""
    targets = targets_of(base)
    for run, run_spec in SPECS.items():
        generator = torch.Generator().manual_seed(run_spec.seed)
        adapter = fresh_adapter(run_spec, targets, torch.device("cpu"))
        pairs = {
            name: LoRAPair(pair.a, torch.randn(pair.b.shape, generator=generator) * 0.02)
            for name, pair in adapter.pairs.items()
        }
        save_adapter(Adapter.of(run_spec, pairs), folder / run, "tiny")
    return {run: folder / run for run in SPECS}


@pytest.fixture
def adapters(moe: Path, tmp_path: Path) -> dict[str, Path]:
    return save_trained(moe, tmp_path)


@pytest.fixture
def start(group, moe, adapters):
    def started(layout: str, checkpointing: str = "off") -> None:
        group.call("start", moe, LAYOUTS[layout], MAX_TOKENS, checkpointing)
        for run, folder in adapters.items():
            group.call("load", run, folder, "adapter")

    return started


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_pass_of_many_adapters_gives_what_each_would_alone_in_peft(
    group, moe, adapters, start, layout, tmp_path
):
    start(layout)
    results = run_good(group, *REQUESTS)
    for request, result in zip(REQUESTS, results, strict=True):
        rows, gradients = expected_alone(moe, adapters[request.run], request)
        for output, row in zip(result.outputs, rows, strict=True):
            np.testing.assert_allclose(output["logprobs"], row, rtol=1e-5, atol=1e-5)
        if request.backward:
            assert_close(gradient(group, request.run, tmp_path / "g"), gradients, relative=2e-5)
