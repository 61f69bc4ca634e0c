"""Saving a run, taking it up again, and what each kind of folder brings back."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from backends.contract import BackendError, OptimStep
from backends.training.trainer import CallRefusedError, Trainer
from tests.unit.backends.material import gradient, run_good, sft, spec, weights

STEP = OptimStep(run="r", learning_rate=1e-2, weight_decay=0.01)


def _train(trainer: Trainer, seeds: range) -> None:
    for seed in seeds:
        run_good(trainer, sft("r", [9, 5], seed))
        trainer.optim_step([STEP])


@pytest.fixture
def saved(trainer, tmp_path):
    """A run saved after two steps, then trained for two more."""
    trainer.create("r", spec(seed=3))
    _train(trainer, range(2))
    size = trainer.save("r", tmp_path / "saved", "optimizer")
    assert size == sum(f.stat().st_size for f in (tmp_path / "saved").iterdir())
    _train(trainer, range(2, 4))
    return tmp_path / "saved", weights(trainer, "r", tmp_path / "end")


def _equal(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def test_resuming_with_the_optimizer_equals_never_having_stopped(
    saved, new_trainer, model_path, llama_path, tmp_path
):
    folder, end = saved
    other = new_trainer(llama_path)
    assert other.load("r", folder, "optimizer") == spec(seed=3)
    _train(other, range(2, 4))
    assert _equal(weights(other, "r", tmp_path / "w"), end)


def test_resuming_without_the_optimizer_starts_its_moments_at_zero(
    saved, new_trainer, llama_path, tmp_path
):
    folder, end = saved
    other = new_trainer(llama_path)
    other.load("r", folder, "adapter")
    run_good(other, sft("r", [9, 5], 2))
    assert other.optim_step([STEP])[0].metrics["step"] == 1
    _train(other, range(3, 4))
    assert not _equal(weights(other, "r", tmp_path / "w"), end)


def test_a_snapshot_brings_the_waiting_gradient_back(trainer, new_trainer, llama_path, tmp_path):
    trainer.create("r", spec())
    _train(trainer, range(1))
    run_good(trainer, sft("r", [7], 8), sft("r", [4], 9))
    trainer.save("r", tmp_path / "snapshot", "snapshot")
    other = new_trainer(llama_path)
    other.load("r", tmp_path / "snapshot", "snapshot")
    for t in (trainer, other):
        run_good(t, sft("r", [5], 10))
    results = [t.optim_step([STEP])[0] for t in (trainer, other)]
    assert results[0] == results[1]
    assert results[0].metrics["num_gradients"] == 3
    a, b = (weights(t, "r", tmp_path / "w") for t in (trainer, other))
    assert _equal(a, b)


@pytest.mark.parametrize("contents", ["adapter", "optimizer"])
def test_loading_drops_the_waiting_gradient(trainer, tmp_path, contents):
    trainer.create("r", spec())
    run_good(trainer, sft("r", [7], 8))
    trainer.save("r", tmp_path / "snapshot", "snapshot")
    trainer.load("r", tmp_path / "snapshot", contents)
    assert gradient(trainer, "r", tmp_path / "a") == {}


def test_a_run_without_steps_or_gradient_saves_and_loads_as_anything(trainer, tmp_path):
    trainer.create("r", spec())
    trainer.save("r", tmp_path / "fresh", "snapshot")
    before = weights(trainer, "r", tmp_path / "w")
    for contents in ("adapter", "optimizer", "snapshot"):
        trainer.load("r", tmp_path / "fresh", contents)
        _train(trainer, range(1))
    trainer.load("r", tmp_path / "fresh", "snapshot")
    assert _equal(weights(trainer, "r", tmp_path / "w"), before)


def test_a_folder_saved_with_less_is_refused_and_the_run_stays(trainer, tmp_path):
    trainer.create("r", spec())
    trainer.save("r", tmp_path / "adapter", "adapter")
    _train(trainer, range(1))
    before = weights(trainer, "r", tmp_path / "w")
    for contents in ("optimizer", "snapshot"):
        with pytest.raises(CallRefusedError, match=contents):
            trainer.load("r", tmp_path / "adapter", contents)
    with pytest.raises(BackendError, match="no adapter"):
        trainer.load("r", tmp_path / "nothing", "adapter")
    assert _equal(weights(trainer, "r", tmp_path / "w"), before)


def test_damaged_files_are_refused(trainer, tmp_path):
    trainer.create("r", spec())
    _train(trainer, range(1))
    for name in ("adapter_model.safetensors", "optimizer.safetensors", "hearth.json"):
        trainer.save("r", tmp_path / "saved", "optimizer")
        path = tmp_path / "saved" / name
        path.write_bytes(path.read_bytes()[:20])
        with pytest.raises(CallRefusedError):
            trainer.load("r", tmp_path / "saved", "optimizer")


def test_create_load_and_unload_know_their_run(trainer, tmp_path):
    with pytest.raises(CallRefusedError, match="not loaded"):
        trainer.save("r", tmp_path / "x", "adapter")
    with pytest.raises(CallRefusedError, match="trains no layer"):
        trainer.create("r", spec(groups=""))
    with pytest.raises(CallRefusedError):
        trainer.create("r", replace(spec(), rank=0))
    trainer.create("r", spec())
    trainer.unload("r")
    trainer.unload("r")
    with pytest.raises(CallRefusedError, match="not loaded"):
        trainer.save("r", tmp_path / "x", "adapter")


def test_create_replaces_everything_a_run_had(trainer, tmp_path):
    trainer.create("r", spec())
    fresh = weights(trainer, "r", tmp_path / "w")
    _train(trainer, range(2))
    run_good(trainer, sft("r", [5]))
    trainer.create("r", spec())
    assert _equal(weights(trainer, "r", tmp_path / "w"), fresh)
    (result,) = trainer.optim_step([STEP])
    assert result.metrics == {"grad_norm": 0.0, "num_gradients": 0.0, "step": 0.0}
