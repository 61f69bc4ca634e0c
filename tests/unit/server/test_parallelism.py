"""Which trainers the settings can mean, and what a group of ranks is started with."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from backends.workers import group
from server import assembly
from server.parallelism import microbatches_at_once, refusal
from server.settings import Settings

MEGATRON = {"trainer": "megatron", "trainer_world_size": 8}


@pytest.mark.parametrize(
    "given",
    [
        {},
        {"device": "cuda:1"},
        {"trainer": "fsdp"},
        {"trainer": "fsdp", "trainer_world_size": 3, "ray": "auto"},
        MEGATRON,
        {**MEGATRON, "tensor_parallel": 2, "pipeline_parallel": 2, "sequence_parallel": True},
        {**MEGATRON, "tensor_parallel": 2, "expert_parallel": 4},
    ],
)
def test_what_can_be(given: dict[str, Any]):
    assert refusal(Settings(**given)) is None


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"trainer_world_size": 2}, ("trainer_world_size is 2", "local", "fsdp or megatron")),
        ({"ray": "local"}, ("ray is local", "trainer local")),
        ({"tensor_parallel": 2}, ("tensor_parallel is 2", "trainer local")),
        ({"trainer": "fsdp", "pipeline_parallel": 4}, ("pipeline_parallel is 4", "fsdp")),
        ({"trainer": "fsdp", "sequence_parallel": True}, ("fsdp", "sequence_parallel")),
        ({"trainer": "fsdp", "device": "cuda:1"}, ("cuda:1", "fsdp")),
        (
            {**MEGATRON, "tensor_parallel": 3, "pipeline_parallel": 2},
            ("tensor_parallel 3", "pipeline_parallel 2", "6", "trainer_world_size 8"),
        ),
        ({**MEGATRON, "expert_parallel": 3}, ("expert_parallel 3", "8")),
        ({**MEGATRON, "pipeline_parallel": 4, "expert_parallel": 4}, ("expert_parallel 4", "2")),
        ({**MEGATRON, "tensor_parallel": 4, "expert_parallel": 4}, ("expert_parallel 4", "2")),
        ({**MEGATRON, "sequence_parallel": True}, ("sequence_parallel", "tensor_parallel is 1")),
    ],
)
def test_what_cannot_be_is_said_in_one_sentence(given: dict[str, Any], words: tuple[str, ...]):
    reason = refusal(Settings(**given))
    assert reason is not None
    assert "\n" not in reason
    for word in words:
        assert word in reason


def test_a_tick_has_something_for_every_rank_that_has_tokens_of_its_own():
    assert microbatches_at_once(Settings()) == 1
    assert microbatches_at_once(Settings(trainer="fsdp", trainer_world_size=4)) == 4
    assert microbatches_at_once(Settings(**MEGATRON, tensor_parallel=2, pipeline_parallel=2)) == 4


def started_with(**given: Any) -> Any:
    """What the coordinator of a model's group reads from its command line."""
    settings = Settings(models={"org/name": Path("model")}, threads=5, **given)
    command = assembly._ranks(settings, "org/name", 0)
    return group.spec(group.parse([*command.words, "--fd", "0"]))


def test_a_group_is_started_with_what_the_settings_say():
    spec = started_with(
        trainer="fsdp",
        trainer_world_size=2,
        device="cpu",
        device_run_bytes=2**21,
        activation_checkpointing="on",
        max_tokens_per_microbatch=48,
        dtype="bfloat16",
    )
    assert spec.trainer == "backends.training.fsdp"
    assert (spec.model, spec.world_size, spec.device) == ("model", 2, "cpu")
    assert (spec.device_run_bytes, spec.activation_checkpointing) == (2**21, "on")
    assert (spec.max_tokens_per_microbatch, spec.dtype) == (48, "bfloat16")
    assert spec.threads == 2, "the ranks share the threads"
    assert spec.layout == {}


def test_megatron_is_told_how_to_divide_the_model_and_runs_in_its_own_environment():
    given = {**MEGATRON, "tensor_parallel": 2, "sequence_parallel": True}
    assert started_with(**given).layout == {
        "tensor_parallel": 2,
        "pipeline_parallel": 1,
        "expert_parallel": 1,
        "sequence_parallel": True,
        "moe_router_dtype": "float32",
    }
    settings = Settings(models={"org/name": Path("m")}, trainer_python=Path("/other"), **given)
    assert assembly._ranks(settings, "org/name", 0).python == Path("/other")


def test_experts_that_nobody_could_sample_from_are_refused(tmp_path: Path):
    (tmp_path / "config.json").write_text(json.dumps({"num_experts": 8}))
    given: dict[str, Any] = {"models": {"org/name": tmp_path}, **MEGATRON}
    reason = assembly.refusal(Settings(**given))
    assert reason == (
        "org/name is a mixture of experts, which the embedded engine cannot sample from: "
        "choose --engine vllm"
    )
    assert assembly.refusal(Settings(**given, engine="vllm")) is None
    (tmp_path / "config.json").write_text(json.dumps({"hidden_size": 8}))
    assert assembly.refusal(Settings(**given)) is None
