"""Passes over a divided model against peft in float64, and against each other."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from backends.contract import Failure, Partial
from backends.lora.peft_folder import save_adapter
from backends.model import FrozenModel
from tests.megatron.group import Group
from tests.megatron.material import (
    LAYOUTS,
    MAX_TOKENS,
    REQUESTS,
    SPECS,
    assert_nan_stays_with_its_run,
    expected_alone,
    gradient,
    run_all,
    run_good,
)
from tests.unit.backends.material import assert_close, sft, spec, trained_adapter


@pytest.fixture
def adapters(base: Path, tmp_path: Path) -> dict[str, Path]:
    """A trained one for each run."""
    model = FrozenModel.load(base, torch.float32, torch.device("cpu"))
    for run, run_spec in SPECS.items():
        save_adapter(trained_adapter(model, run_spec), tmp_path / run, model.name)
    return {run: tmp_path / run for run in SPECS}


@pytest.fixture
def start(group: Group, base: Path, adapters: dict[str, Path]):
    def started(layout: str, checkpointing: str = "off") -> None:
        group.call("start", base, LAYOUTS[layout], MAX_TOKENS, checkpointing)
        for run, folder in adapters.items():
            group.call("load", run, folder, "adapter")

    return started


TWO_BY_TWO = "tensor 2, pipeline 2"
only_llama = pytest.mark.parametrize("base", ["llama"], indirect=True)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_pass_of_many_adapters_gives_what_each_would_alone_in_peft(
    group, base, adapters, start, layout, tmp_path
):
    start(layout)
    results = run_good(group, *REQUESTS)
    for request, result in zip(REQUESTS, results, strict=True):
        rows, gradients = expected_alone(base, adapters[request.run], request)
        for output, row in zip(result.outputs, rows, strict=True):
            np.testing.assert_allclose(output["logprobs"], row, rtol=1e-5, atol=1e-5)
        if request.backward:
            assert_close(gradient(group, request.run, tmp_path / "g"), gradients, relative=2e-5)


@only_llama
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_run_alone_trains_whatever_its_adapter_changes(
    group, base, adapters, start, layout, tmp_path
):
    """The head alone, too, before which no layer wants a gradient."""
    start(layout)
    group.call("create", "head", spec(rank=4, seed=9, groups="unembed"))
    group.call("save", "head", tmp_path / "head", "adapter")
    for run, folder in {**adapters, "head": tmp_path / "head"}.items():
        request = sft(run, [9, 5], seed=3)
        run_good(group, request)
        _, gradients = expected_alone(base, folder, request)
        assert_close(gradient(group, run, tmp_path / "g"), gradients, relative=2e-5)


@only_llama
@pytest.mark.parametrize("checkpointing", ["on", "auto"])
@pytest.mark.parametrize("layout", [TWO_BY_TWO, "tensor 2, data 2"])
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


@only_llama
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_request_that_fails_leaves_nothing_and_the_others_as_they_were(
    group, start, adapters, layout, tmp_path
):
    assert_nan_stays_with_its_run(group, lambda: start(layout), adapters, tmp_path)


@only_llama
def test_a_gradient_that_is_not_finite_is_dropped_by_all_ranks(group, start, tmp_path):
    """The loss is, and so is what some of the ranks find."""
    start(TWO_BY_TWO)
    request = sft("d", [40])
    weights = np.full(40, 3e37, np.float32)
    [datum] = request.data
    huge = replace(datum, loss_inputs=datum.loss_inputs | {"weights": weights})
    [result, _] = run_all(group, [replace(request, data=(huge,)), sft("a", [9])])
    assert result == Failure(
        message="the loss is finite but its gradient is not; it is dropped", category="user"
    )
    assert gradient(group, "d", tmp_path / "g") == {}


@only_llama
@pytest.mark.parametrize("layout", LAYOUTS)
def test_ranks_that_have_no_datum_stay_in_step(group, start, adapters, base, layout, tmp_path):
    start(layout)
    request = sft("a", [3], seed=8)
    [result] = run_good(group, request)
    [row], gradients = expected_alone(base, adapters["a"], request)
    np.testing.assert_allclose(result.outputs[0]["logprobs"], row, rtol=1e-5, atol=1e-5)
    assert_close(gradient(group, "a", tmp_path / "g"), gradients, relative=2e-5)
    [result] = run_good(group, replace(request, backward=False))
    np.testing.assert_allclose(result.outputs[0]["logprobs"], row, rtol=1e-5, atol=1e-5)


@only_llama
def test_parts_of_a_request_add_up_to_the_whole(group, start, tmp_path):
    start("tensor 2, data 2")
    whole = REQUESTS[0]
    [expected] = run_good(group, whole)
    wanted = gradient(group, "a", tmp_path / "g")
    start("tensor 2, data 2")
    [outcome] = run_all(group, [replace(whole, data=whole.data[:3], more=True)])
    assert outcome == Partial()
    [result] = run_good(group, replace(whole, data=whole.data[3:]))
    assert result.metrics == pytest.approx(expected.metrics, rel=1e-6)
    assert_close(gradient(group, "a", tmp_path / "g"), wanted, relative=1e-6)


@only_llama
def test_a_base_model_in_bfloat16_gives_nearly_the_same(group, start, base, adapters):
    start(TWO_BY_TWO)
    expected = run_good(group, *REQUESTS)
    group.call("start", base, LAYOUTS[TWO_BY_TWO], MAX_TOKENS, "off", torch.bfloat16)
    for run, folder in adapters.items():
        group.call("load", run, folder, "adapter")
    for ours, theirs in zip(run_good(group, *REQUESTS), expected, strict=True):
        assert ours.metrics["loss:sum"] == pytest.approx(theirs.metrics["loss:sum"], rel=0.02)
