"""What is reckoned against what the local trainer says, keeps and takes."""

from __future__ import annotations

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    PretrainedConfig,
    Qwen2Config,
    Qwen3Config,
)

from backends.batching import attention
from backends.contract import AdapterSpec, OptimStep
from backends.model import FrozenModel
from backends.training.activations import bytes_per_token
from backends.training.local import local_trainer
from server.planning import memory
from server.planning.activations import PassShape
from server.planning.memory import TrainerMemory, Workload
from server.planning.shapes import ModelShape
from tests.peak_memory import peak_bytes
from tests.unit.backends.material import run_good, sft

RANK, TOKENS = 8, 1024
SIZES = {
    "vocab_size": 256,
    "hidden_size": 192,
    "intermediate_size": 512,
    "num_hidden_layers": 6,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 2048,
}
CONFIGS = {
    "llama": LlamaConfig(**SIZES, tie_word_embeddings=True),
    "llama with biases": LlamaConfig(**SIZES, attention_bias=True, mlp_bias=True),
    "qwen2": Qwen2Config(**SIZES),
    "qwen3": Qwen3Config(**SIZES, head_dim=48),
}
GROUPS = [("attn", "mlp", "unembed"), ("attn",), ("mlp", "unembed")]


@pytest.fixture(scope="module", params=CONFIGS)
def config(request: pytest.FixtureRequest) -> PretrainedConfig:
    return CONFIGS[request.param]


@pytest.fixture(scope="module", params=[torch.float32, torch.bfloat16], ids=str)
def model(request: pytest.FixtureRequest, config: PretrainedConfig) -> FrozenModel:
    attention.register()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    made = AutoModelForCausalLM.from_config(
        config, dtype=request.param, attn_implementation=attention.NAME
    )
    return FrozenModel(made.requires_grad_(False).eval(), config, ())


def _spec(groups: tuple[str, ...]) -> AdapterSpec:
    wanted = {f"train_{group}": group in groups for group in GROUPS[0]}
    return AdapterSpec(rank=RANK, alpha=RANK, seed=0, **wanted)


def _planned(
    model: FrozenModel, config: PretrainedConfig, groups: tuple[str, ...], runs: int = 1
) -> TrainerMemory:
    made = PassShape(dtype_bytes=model.dtype.itemsize, rank=RANK, groups=groups)
    return memory.local(ModelShape.of(config.to_dict()), Workload(runs=runs, made=made))


@pytest.mark.parametrize("groups", GROUPS, ids="+".join)
def test_base_adapters_and_optimizer_are_what_the_trainer_reports(model, config, groups):
    trainer = local_trainer(model, TOKENS)
    for run in "rs":
        trainer.create(run, _spec(groups))
        run_good(trainer, sft(run, [5]))
    trainer.optim_step([OptimStep(run=run, learning_rate=1e-3) for run in "rs"])
    run_good(trainer, sft("r", [5]), sft("s", [7]))
    reported, planned = trainer.memory(), _planned(model, config, groups, runs=2)
    assert planned.base == reported.base_model
    assert planned.adapters == sum(run.weights for run in reported.runs.values())
    states = sum(run.moments + run.gradient for run in reported.runs.values())
    assert planned.optimizer == states


@pytest.mark.parametrize("groups", GROUPS, ids="+".join)
def test_kept_activations_are_what_autograd_keeps(model, config, groups):
    trainer = local_trainer(model, TOKENS)
    trainer.create("r", _spec(groups))
    adapter, planned = trainer._runs["r"].adapter, _planned(model, config, groups)
    kept = bytes_per_token(model, adapter)
    if "attn" in groups:
        assert planned.kept_token == pytest.approx(kept, rel=1e-6)
    else:  # nothing before the first MLP has a gradient, which is not reckoned with
        assert kept < planned.kept_token < kept * (1 + 1 / config.num_hidden_layers)
    recomputed = bytes_per_token(model, adapter, recompute=True)
    # The rotations are not kept by autograd, but by the pass.
    assert recomputed <= planned.input_token <= 1.15 * recomputed


@pytest.mark.parametrize("recompute", [False, True], ids=["kept", "recomputed"])
def test_a_pass_takes_no_more_than_reckoned_and_nearly_as_much(model, config, recompute):
    trainer = local_trainer(model, TOKENS, "on" if recompute else "off")
    trainer.create("r", _spec(GROUPS[0]))
    request = sft("r", [TOKENS // 4] * 4)
    run_good(trainer, request)
    taken = peak_bytes(model.device, lambda: run_good(trainer, request))
    planned = _planned(model, config, GROUPS[0])
    reckoned = planned.in_pass + planned.activations(TOKENS, recompute=recompute)
    assert 0.8 * reckoned < taken < reckoned
