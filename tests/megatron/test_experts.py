"""A mixture of experts, divided in every way, against peft in float64."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

from backends.contract import ForwardBackward, OptimStep
from backends.lora.adapter import UNEMBED, Adapter, LoRAPair, Target, fresh_adapter
from backends.lora.peft_folder import save_adapter
from tests.megatron.group import first
from tests.megatron.material import (
    MAX_TOKENS,
    REQUESTS,
    SPECS,
    assert_nan_stays_with_its_run,
    expected_alone,
    gradient,
    run_good,
)
from tests.tiny_models import tiny_qwen3_moe
from tests.unit.backends.material import assert_close, sft
from tests.unit.backends.oracle import logprobs, peft_model, trainable
from tests.unit.backends.together import RUNS

LAYOUTS: dict[str, dict[str, int | bool]] = {
    "expert 2, data 4": {"expert_parallel": 2},
    "expert 4": {"expert_parallel": 4},
    "expert 2, tensor 2": {"expert_parallel": 2, "tensor_parallel": 2, "sequence_parallel": True},
    "expert 2, pipeline 2": {"expert_parallel": 2, "pipeline_parallel": 2},
    "data 4": {},
}
"""Of four ranks."""
NUM_STEPS = 5
STEP = OptimStep(run="a", learning_rate=1e-2, eps=1e-3)


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


@pytest.mark.parametrize(
    "changes",
    [
        {"norm_topk_prob": False},
        {"mlp_only_layers": [1]},
        {"decoder_sparse_step": 2, "num_experts_per_tok": 3},
    ],
)
def test_other_ways_to_place_and_weigh_experts(group, tmp_path, changes):
    base = tiny_qwen3_moe(tmp_path / "base", **changes)
    adapters = save_trained(base, tmp_path)
    request = REQUESTS[0]
    group.call("start", base, LAYOUTS["expert 2, tensor 2"], MAX_TOKENS)
    group.call("load", "a", adapters["a"], "adapter")
    assert first(group.call("targets")) == targets_of(base)
    [result] = run_good(group, request)
    rows, gradients = expected_alone(base, adapters["a"], request)
    for output, row in zip(result.outputs, rows, strict=True):
        np.testing.assert_allclose(output["logprobs"], row, rtol=1e-5, atol=1e-5)
    assert_close(gradient(group, "a", tmp_path / "g"), gradients, relative=2e-5)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_base_model_comes_back_as_it_was(group, moe, start, layout):
    start(layout)
    assert first(group.call("targets")) == targets_of(moe)
    exported = group.call("exported")[0]
    original = AutoModelForCausalLM.from_pretrained(moe).state_dict()
    assert exported.keys() == original.keys()
    assert all(torch.equal(tensor, original[name]) for name, tensor in exported.items())


@pytest.mark.parametrize("layout", LAYOUTS)
def test_ranks_and_experts_that_have_no_token_stay_in_step(
    group, moe, adapters, start, layout, tmp_path
):
    """Two tokens go to at most four of eight experts, from the copies of one rank."""
    start(layout)
    request = sft("a", [2], seed=8)
    [result] = run_good(group, request)
    [row], gradients = expected_alone(moe, adapters["a"], request)
    np.testing.assert_allclose(result.outputs[0]["logprobs"], row, rtol=1e-5, atol=1e-5)
    found = gradient(group, "a", tmp_path / "g")
    assert len(found) > len(gradients), "peft has no gradient for experts without a token"
    idle = {name: found.pop(name) for name in found.keys() - gradients.keys()}
    assert all(".experts." in name and not tensor.any() for name, tensor in idle.items())
    assert_close(found, gradients, relative=2e-5)
    run_good(group, replace(request, backward=False))


@pytest.mark.parametrize("checkpointing", ["on", "auto"])
@pytest.mark.parametrize("layout", ["expert 2, tensor 2", "expert 2, pipeline 2"])
def test_layers_that_are_computed_again_give_the_same_numbers(
    group, start, layout, checkpointing, tmp_path
):
    start(layout)
    expected = run_good(group, *REQUESTS)
    gradients = {run: gradient(group, run, tmp_path / "g") for run in "abcd"}
    start(layout, checkpointing)
    for ours, theirs in zip(run_good(group, *REQUESTS), expected, strict=True):
        assert ours.metrics == pytest.approx(theirs.metrics, rel=1e-6)
    for run, wanted in gradients.items():
        assert_close(gradient(group, run, tmp_path / "g"), wanted, relative=1e-6)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_nan_of_one_adapter_goes_through_the_router_and_to_nobody_else(
    group, start, adapters, layout, tmp_path
):
    assert_nan_stays_with_its_run(group, lambda: start(layout), adapters, tmp_path)


@pytest.mark.parametrize(
    ("layout", "reason"),
    [
        ({"expert_parallel": 3}, "qwen3_moe: num_experts = 8 cannot be divided among 3 ranks"),
        (
            {"tensor_parallel": 2},
            "qwen3_moe: experts with tensor_parallel = 2 need sequence_parallel, without which "
            "each would see every token several times",
        ),
    ],
)
def test_experts_that_cannot_be_divided_are_refused(group, moe, layout, reason):
    assert set(group.call("not_started", moe, layout)) == {reason}


def test_the_router_computes_in_float32_unless_told_otherwise(group, moe):
    """With a model in bfloat16, from the same inputs and weights."""
    hidden = torch.randn(9, 1, 64, generator=torch.Generator().manual_seed(0)).bfloat16()
    weight = AutoModelForCausalLM.from_pretrained(moe).model.layers[0].mlp.gate.weight.bfloat16()
    exact = hidden.float() @ weight.float().T
    for option, dtype in (({}, torch.float32), ({"moe_router_dtype": "model"}, torch.bfloat16)):
        group.call("start", moe, option, MAX_TOKENS, "off", torch.bfloat16)
        logits = group.call("router_logits", hidden)[0]
        assert logits.dtype == dtype
        torch.testing.assert_close(logits, exact.to(dtype).detach())


def peft_steps(base: Path, adapter: Path) -> tuple[list[float], dict[str, Tensor]]:
    """The loss before each step, and the weights after all."""
    model = peft_model(base, adapter)
    weights = trainable(model)
    optimizer = torch.optim.AdamW(
        weights.values(), lr=1e-2, betas=(STEP.beta1, STEP.beta2), eps=STEP.eps, weight_decay=0.0
    )
    losses = []
    for number in range(NUM_STEPS):
        # Experts without a token have a gradient too: their moments fade.
        for weight in weights.values():
            weight.grad = torch.zeros_like(weight)
        loss = torch.zeros((), dtype=torch.float64)
        for datum in steps_request(number).data:
            tokens, targets = (
                torch.from_numpy(ids) for ids in (datum.tokens, datum.loss_inputs["target_tokens"])
            )
            scores = torch.from_numpy(datum.loss_inputs["weights"])
            loss = loss - (logprobs(model, tokens, targets) * scores).sum()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses, {name: weight.detach() for name, weight in weights.items()}


def steps_request(number: int) -> ForwardBackward:
    return sft("a", [9, 5, 13], seed=number)


@pytest.mark.parametrize(
    ("before", "after"),
    [("expert 2, tensor 2", "expert 4"), ("data 4", "expert 2, pipeline 2")],
)
def test_steps_are_those_of_torch_from_one_way_to_divide_experts_to_another(
    group, moe, adapters, start, before, after, tmp_path
):
    losses, weights = peft_steps(moe, adapters["a"])
    start(before)
    found = []
    for number in range(NUM_STEPS):
        if number == 3:
            group.call("save", "a", tmp_path / "half", "optimizer")
            group.call("start", moe, LAYOUTS[after], MAX_TOKENS)
            group.call("load", "a", tmp_path / "half", "optimizer")
        [result] = run_good(group, steps_request(number))
        found.append(result.metrics["loss:sum"])
        first(group.call("optim_step", [STEP]))
    assert found == pytest.approx(losses, rel=1e-4)
    group.call("save", "a", tmp_path / "end", "adapter")
    tensors = load_file(tmp_path / "end" / "adapter_model.safetensors")
    trained = {name.removeprefix("base_model.model."): t for name, t in tensors.items()}
    assert_close(trained, weights, relative=1e-4)


def test_a_story_of_several_tenants_is_the_same_however_experts_are_divided(group, moe, tmp_path):
    """With `data 4` every rank has all experts."""
    told = {}
    for layout in ("data 4", "expert 4", "expert 2, tensor 2", "expert 2, pipeline 2"):
        group.call("start", moe, LAYOUTS[layout], MAX_TOKENS)
        told[layout] = first(group.call("story", tmp_path / layout))
    expected = told.pop("data 4")
    for found in told.values():
        assert found.failure == expected.failure
        for run in RUNS:
            assert found.losses[run] == pytest.approx(expected.losses[run], rel=1e-4)
            assert found.norms[run] == pytest.approx(expected.norms[run], rel=1e-4)


@pytest.mark.parametrize("router", ["float32", "model"])
def test_a_base_model_in_bfloat16_gives_nearly_the_same(group, moe, adapters, start, router):
    start("expert 2, tensor 2")
    expected = run_good(group, *REQUESTS)
    layout = LAYOUTS["expert 2, tensor 2"] | {"moe_router_dtype": router}
    group.call("start", moe, layout, MAX_TOKENS, "off", torch.bfloat16)
    for run, folder in adapters.items():
        group.call("load", run, folder, "adapter")
    for ours, theirs in zip(run_good(group, *REQUESTS), expected, strict=True):
        assert ours.metrics["loss:sum"] == pytest.approx(theirs.metrics["loss:sum"], rel=0.05)
