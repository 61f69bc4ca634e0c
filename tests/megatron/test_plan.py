"""What `hearth doctor --plan` reckons from a config alone is what the ranks have."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from server.planning.layouts import Sizes, Stage, adapter_numbers, base_parameters, stages
from server.planning.shapes import ModelShape
from tests.megatron.material import LAYOUTS, MAX_TOKENS
from tests.tiny_models import tiny_qwen3_moe
from tests.unit.backends.material import spec

OF_EXPERTS: dict[str, dict[str, Any]] = {
    "expert 4": {"expert_parallel": 4},
    "expert 2, tensor 2": {"expert_parallel": 2, "tensor_parallel": 2, "sequence_parallel": True},
    "expert 2, pipeline 2": {"expert_parallel": 2, "pipeline_parallel": 2},
}


def stages_of_ranks(shape: ModelShape, layout: dict[str, Any]) -> list[Stage]:
    """Of four ranks; those of a stage follow each other."""
    tensor, pipeline = layout.get("tensor_parallel", 1), layout.get("pipeline_parallel", 1)
    data, expert = 4 // (tensor * pipeline), layout.get("expert_parallel", 1)
    sizes = Sizes(tensor=tensor, pipeline=pipeline, data=data, expert=expert)
    assert sizes.refusal(shape) is None
    return [stage for stage in stages(shape, sizes) for _ in range(4 // pipeline)]


def assert_as_planned(group, base: Path, layout: dict[str, Any]) -> None:
    shape = ModelShape.of(json.loads((base / "config.json").read_bytes()))
    group.call("start", base, layout, MAX_TOKENS)
    for groups in ("attn", "mlp", "attn mlp unembed"):
        group.call("create", "a", spec(rank=3, groups=groups))
        found = group.call("memory", "a")
        for stage, (base_model, weights, _) in zip(
            stages_of_ranks(shape, layout), found, strict=True
        ):
            assert weights == 4 * adapter_numbers(shape, 3, groups.split(), stage)
            assert base_model == 4 * base_parameters(shape, stage)
        for _, _, report in found:
            assert report.base_model == sum(base_model for base_model, _, _ in found)
            assert report.runs["a"].weights == sum(weights for _, weights, _ in found)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_parts_of_an_adapter_and_of_the_model_are_as_planned(group, base, layout):
    assert_as_planned(group, base, LAYOUTS[layout])


@pytest.mark.parametrize("layout", OF_EXPERTS)
def test_so_are_those_of_experts(group, tmp_path, layout):
    base = tiny_qwen3_moe(tmp_path, mlp_only_layers=[0])
    assert_as_planned(group, base, OF_EXPERTS[layout])
