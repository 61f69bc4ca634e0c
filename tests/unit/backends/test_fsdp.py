"""Ranks that share one base model train as one process does."""

from __future__ import annotations

import numpy as np
import pytest
from safetensors.torch import load_file

from backends.training import fsdp
from tests.unit.backends.together import RUNS, play, play_in_group


@pytest.mark.parametrize(
    ("world_size", "checkpointing"), [(1, "off"), (2, "auto"), (2, "on"), (4, "off")]
)
def test_ranks_together_train_as_one_process(
    model_path, load_model, new_trainer, tmp_path, world_size, checkpointing
):
    expected = play(new_trainer(model_path, max_tokens=32), tmp_path / "alone")
    told = play_in_group(
        fsdp.load,
        model_path,
        world_size,
        tmp_path / "group",
        activation_checkpointing=checkpointing,
    )
    assert told.failure == expected.failure
    assert sum(told.base_bytes) == load_model(model_path).num_bytes
    assert told.memory == world_size * expected.memory, "every rank has the whole run"
    assert max(told.base_bytes) <= 1.1 * min(told.base_bytes)
    for run in RUNS:
        np.testing.assert_allclose(told.losses[run], expected.losses[run], rtol=1e-4)
        np.testing.assert_allclose(told.norms[run], expected.norms[run], rtol=1e-4)
        for ours, theirs in zip(told.logprobs[run], expected.logprobs[run], strict=True):
            np.testing.assert_allclose(ours, theirs, rtol=1e-4, atol=1e-5)
        _same_folders(tmp_path / "group" / run, tmp_path / "alone" / run)


def _same_folders(ours, theirs) -> None:
    assert {f.name for f in ours.iterdir()} == {f.name for f in theirs.iterdir()}
    assert (ours / "hearth.json").read_bytes() == (theirs / "hearth.json").read_bytes()
    for file in theirs.glob("*.safetensors"):
        mine, other = load_file(ours / file.name), load_file(file)
        assert mine.keys() == other.keys()
        for name, tensor in other.items():
            assert mine[name].shape == tensor.shape
            scale = tensor.abs().max().clamp(min=1e-6)
            assert (mine[name] - tensor).abs().max() <= 1e-4 * scale, (file.name, name)
