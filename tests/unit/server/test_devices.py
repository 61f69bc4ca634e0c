"""Which GPUs the settings give to whom, and what they cannot mean."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from server import devices
from server.settings import Settings

TWO = {"org/a": Path("a"), "org/b": Path("b")}


def test_devices_go_by_base_model_then_by_server():
    settings = Settings(
        models=TWO,
        engine="vllm",
        engine_replicas=2,
        trainer_devices=("0", "1"),
        engine_devices=("2", "3", "4,5", "6,7"),
    )
    assert devices.refusal(settings) is None
    assert [devices.of_trainer(settings, name, 0) for name in TWO] == ["0", "1"]
    assert devices.of_replicas(settings, 0) == ("2", "3")
    assert devices.of_replicas(settings, 1) == ("4,5", "6,7")


def test_the_trainer_groups_of_a_base_model_follow_each_other():
    settings = Settings(models=TWO, trainer_groups=2, trainer_devices=("0", "1", "2", "3"))
    assert devices.refusal(settings) is None
    groups = [devices.of_trainer(settings, name, number) for name in TWO for number in (0, 1)]
    assert groups == ["0", "1", "2", "3"]


def test_where_none_are_named_all_see_what_the_service_sees():
    settings = Settings(models=TWO, engine="vllm")
    assert devices.refusal(settings) is None
    assert devices.of_trainer(settings, "org/a", 0) is None
    assert devices.of_replicas(settings, 1) == ()


def test_a_share_of_a_gpu_is_above_nothing_and_at_most_all():
    for share in (0, 1.01):
        with pytest.raises(ValueError, match="engine_gpu_memory_utilization"):
            Settings(engine_gpu_memory_utilization=share)


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        (
            {"engine_devices": ("1", "2", "3"), "engine_replicas": 2},
            "engine_devices names GPUs for 3, but 4 vLLM servers are started",
        ),
        ({"trainer_devices": ("0",)}, "trainer_devices names GPUs for 1, but 2 trainers are"),
        ({"trainer_devices": ("0,", "1")}, "trainer_devices: '0,' is no list of GPUs"),
        ({"trainer_devices": ("0 1", "2")}, "trainer_devices: '0 1' is no list of GPUs"),
        ({"engine_devices": ("1", "2"), "engine": "embedded"}, "it starts none"),
    ],
)
def test_what_they_cannot_mean_is_told_in_one_sentence(wrong: dict[str, Any], words: str):
    reason = devices.refusal(Settings(**{"models": TWO, "engine": "vllm", **wrong}))
    assert reason is not None
    assert words in reason
