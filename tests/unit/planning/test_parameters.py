"""Parameters by arithmetic over config.json against transformers' own models, without weights."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, Qwen3MoeConfig

from server.planning.layouts import base_parameters, layer_parameters
from server.planning.shapes import ModelShape, PlanRefused
from tests.tiny_models import tiny_llama, tiny_qwen3
from tests.unit.planning.configs import ALL, LLAMA_31_8B, QWEN3_4B, QWEN3_30B_A3B

TINY = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 5, "vocab_size": 300}
VARIANTS: dict[str, dict[str, Any]] = {
    "biases everywhere": {**LLAMA_31_8B, **TINY, "attention_bias": True, "mlp_bias": True},
    "Qwen3 with biases": {**QWEN3_4B, **TINY, "attention_bias": True},
    "experts in every second layer, but one": {
        **QWEN3_30B_A3B,
        **TINY,
        "num_experts": 6,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 40,
        "decoder_sparse_step": 2,
        "mlp_only_layers": [3],
    },
}


def _counted(config: dict[str, Any]) -> torch.nn.Module:
    rest = {name: value for name, value in config.items() if name != "model_type"}
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(AutoConfig.for_model(config["model_type"], **rest))


@pytest.mark.parametrize("config", [*ALL.values(), *VARIANTS.values()], ids=[*ALL, *VARIANTS])
def test_parameters_are_those_of_transformers(config: dict[str, Any]):
    model, shape = _counted(config), ModelShape.of(config)
    assert base_parameters(shape) == sum(p.numel() for p in model.parameters())
    layers = model.get_submodule("model.layers")
    for number, layer in enumerate(layers.children()):
        assert layer_parameters(shape, number) == sum(p.numel() for p in layer.parameters())


@pytest.mark.parametrize(
    ("name", "published"),
    [("Qwen3-30B-A3B", 30.5e9), ("Llama-3.1-8B", 8.03e9), ("SmolLM2-135M", 134.5e6)],
)
def test_parameters_are_those_that_were_published(name: str, published: float):
    assert base_parameters(ModelShape.of(ALL[name])) == pytest.approx(published, rel=2e-3)


@pytest.mark.parametrize("write", [tiny_llama, tiny_qwen3])
def test_a_folder_that_transformers_wrote_says_the_same(tmp_path: Path, write):
    folder = write(tmp_path / "model")
    shape = ModelShape.of(json.loads((folder / "config.json").read_bytes()))
    model = AutoModelForCausalLM.from_pretrained(folder)
    assert base_parameters(shape) == model.num_parameters()


def test_experts_go_by_either_name(tmp_path: Path):
    Qwen3MoeConfig(num_experts=12, num_hidden_layers=3).save_pretrained(tmp_path)
    shape = ModelShape.of(json.loads((tmp_path / "config.json").read_bytes()))
    assert shape.num_experts == 12
    assert shape.expert_layers == {0, 1, 2}


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"model_type": "mamba"}, "model_type 'mamba' is none of llama, qwen2, qwen3, qwen3_moe"),
        ({"hidden_size": None}, "hidden_size of config.json is None, not a count of 1 or more"),
        ({"num_hidden_layers": 0}, "num_hidden_layers of config.json is 0"),
        ({"vocab_size": "many"}, "vocab_size of config.json is 'many'"),
    ],
)
def test_what_cannot_be_planned_is_refused(change: dict[str, Any], words: str):
    with pytest.raises(PlanRefused) as refused:
        ModelShape.of({**QWEN3_4B, **change})
    assert words in str(refused.value)
