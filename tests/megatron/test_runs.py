"""Runs on a divided model are the runs of one process: same starts, steps and folders."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from backends.contract import OptimStep, StepResult
from tests.megatron.group import first
from tests.megatron.material import LAYOUTS, MAX_TOKENS, gradient, run_good
from tests.unit.backends import material
from tests.unit.backends.material import assert_close, sft, spec

SPECS = {"a": spec(rank=4, seed=1), "b": spec(rank=8, seed=2, groups="attn unembed")}
STEPS = {
    "a": OptimStep(run="a", learning_rate=1e-2, eps=1e-3),
    "b": OptimStep(run="b", learning_rate=3e-3, eps=1e-3, weight_decay=0.1, grad_clip_norm=5.0),
}
TWO_BY_TWO = "tensor 2, pipeline 2"
only_llama = pytest.mark.parametrize("base", ["llama"], indirect=True)


def _requests(number: int):
    return [sft("a", [9, 20, 9], seed=number), sft("b", [4, 31], seed=number + 100)]


def _stepped(results) -> list[dict[str, float]]:
    assert all(isinstance(result, StepResult) for result in results)
    return [result.metrics for result in results]


def _files(folder):
    return {file.name: load_file(file) for file in folder.glob("*.safetensors")}


@pytest.fixture
def start(group, base):
    def started(layout: str = TWO_BY_TWO) -> None:
        group.call("start", base, LAYOUTS[layout], MAX_TOKENS)

    return started


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_base_model_comes_back_as_it_was(group, base, start, layout):
    start(layout)
    exported = group.call("exported")[0]
    original = AutoModelForCausalLM.from_pretrained(base)
    for name, tensor in exported.items():
        assert torch.equal(tensor, original.state_dict()[name]), name
    missing = original.state_dict().keys() - exported.keys()
    assert missing == ({"lm_head.weight"} if original.config.tie_word_embeddings else set())


@pytest.mark.parametrize("layout", LAYOUTS)
def test_five_steps_are_those_of_one_process(group, base, local, start, layout, tmp_path):
    start(layout)
    assert replace(first(group.call("info"))) == local.info()
    for run, run_spec in SPECS.items():
        local.create(run, run_spec)
        group.call("create", run, run_spec)
        for trainer, folder in ((local, "one"), (None, "many")):
            save = trainer.save if trainer else lambda *args: group.call("save", *args)
            save(run, tmp_path / folder, "snapshot")
        assert_same_folders(tmp_path / "many", tmp_path / "one")
    for number in range(5):
        ours = run_good(group, *_requests(number))
        theirs = material.run_good(local, *_requests(number))
        for our, their in zip(ours, theirs, strict=True):
            assert our.metrics == pytest.approx(their.metrics, rel=1e-4)
        steps = list(STEPS.values())
        for our, their in zip(
            _stepped(first(group.call("optim_step", steps))),
            _stepped(local.optim_step(steps)),
            strict=True,
        ):
            assert our == pytest.approx(their, rel=1e-4)


def assert_same_folders(ours, theirs) -> None:
    assert (ours / "hearth.json").read_text() == (theirs / "hearth.json").read_text()
    for name, tensors in _files(theirs).items():
        found = load_file(ours / name)
        assert found.keys() == tensors.keys()
        assert all(torch.equal(found[key], tensor) for key, tensor in tensors.items())


@only_llama
@pytest.mark.parametrize("layout", [TWO_BY_TWO, "data 4"])
def test_a_run_goes_on_in_one_process_and_back_with_the_same_losses(
    group, local, start, layout, tmp_path
):
    """Saved between a request and its step, with moments from a step before."""
    start(layout)
    group.call("create", "a", SPECS["a"])
    run_good(group, _requests(0)[0])
    group.call("optim_step", [STEPS["a"]])
    run_good(group, _requests(1)[0])
    group.call("save", "a", tmp_path / "there", "snapshot")
    local.load("a", tmp_path / "there", "snapshot")
    local.save("a", tmp_path / "back", "snapshot")
    assert_same_folders(tmp_path / "back", tmp_path / "there")
    group.call("unload", "a")
    assert group.call("load", "a", tmp_path / "back", "snapshot") == [SPECS["a"]] * 4
    assert_close(
        gradient(group, "a", tmp_path / "g"), material.gradient(local, "a", tmp_path / "h"), 0.0
    )
    [ours] = _stepped(first(group.call("optim_step", [STEPS["a"]])))
    [theirs] = _stepped(local.optim_step([STEPS["a"]]))
    assert ours == pytest.approx(theirs, rel=1e-6)
    [our] = run_good(group, _requests(2)[0])
    [their] = material.run_good(local, _requests(2)[0])
    assert our.metrics == pytest.approx(their.metrics, rel=1e-5)


@only_llama
def test_a_folder_that_cannot_be_loaded_is_refused_on_every_rank(group, start, tmp_path):
    start()
    group.call("create", "a", SPECS["a"])
    [reason] = set(group.call("refused", "a", tmp_path / "nothing", "adapter"))
    assert "nothing" in reason
    run_good(group, _requests(0)[0])


@only_llama
@pytest.mark.parametrize(
    ("layout", "reason"),
    [
        ({"tensor_parallel": 4}, "llama: num_key_value_heads = 2 cannot be divided among 4 ranks"),
        ({"expert_parallel": 2}, "llama: there are no experts to divide"),
        ({"pipeline_parallel": 4}, "llama: num_hidden_layers = 2 cannot be divided among 4 ranks"),
    ],
)
def test_a_model_that_cannot_be_divided_is_refused(group, base, layout, reason):
    assert set(group.call("not_started", base, layout)) == {reason}
