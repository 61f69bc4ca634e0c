"""What the settings say of a worker reaches the trainer in it."""

from __future__ import annotations

import argparse
from pathlib import Path

import pytest
import torch

from backends.contract import BackendError
from backends.model import FrozenModel
from backends.workers import main
from backends.workers.commands import Command
from backends.workers.subprocess import SubprocessBackend
from server import assembly
from server.settings import Settings
from tests.tiny_models import tiny_llama, with_tokenizer
from tests.unit.backends.material import run_good, sft, spec


async def test_trainer_groups_share_the_cores_and_have_logs_of_their_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    started: list[tuple[int, str]] = []

    async def start(command: Command, log_file: Path) -> None:
        started.append((_read(command).threads, log_file.name))
        raise BackendError("that will do")

    monkeypatch.setattr(SubprocessBackend, "start", start)
    monkeypatch.setattr(assembly.os, "cpu_count", lambda: 7)
    settings = Settings(models={"org/name": tmp_path}, data=tmp_path, trainer_groups=3)
    for group in assembly.trainer_groups(settings, "org/name"):
        with pytest.raises(BackendError, match="that will do"):
            await group.describe()
    assert started == [
        (2, "worker-org--name.log"),
        (2, "worker-org--name-1.log"),
        (2, "worker-org--name-2.log"),
    ]


def _read(command: Command) -> argparse.Namespace:
    """As the worker reads it."""
    return main.parse([*command.words, "--fd", "0"])


@pytest.mark.parametrize(("checkpointing", "recompute"), [("on", True), ("off", False)])
def test_a_worker_is_started_with_what_the_settings_say(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, checkpointing: str, recompute: bool
):
    path = with_tokenizer(tiny_llama(tmp_path / "model"))
    settings = Settings(
        data=tmp_path,
        models={"org/other": path, "org/name": path},
        trainer_devices=("0,1", "2,3"),
        threads=1,
        max_tokens_per_microbatch=48,
        device_run_bytes=2**21,
        activation_checkpointing=checkpointing,
    )
    command = assembly._trainer(settings, "org/name", 0)
    assert command.environment == {"CUDA_VISIBLE_DEVICES": "2,3"}
    arguments = _read(command)
    assert arguments.threads == 1
    assert arguments.device == torch.device("cuda" if torch.cuda.is_available() else "cpu")
    assert arguments.device_run_bytes == 2**21
    trainer, _ = main.load(arguments)

    seen: list[tuple[int, bool]] = []
    hidden = FrozenModel.hidden

    def watched(model: FrozenModel, tokens, *args, recompute: bool):
        seen.append((len(tokens), recompute))
        return hidden(model, tokens, *args, recompute=recompute)

    monkeypatch.setattr(FrozenModel, "hidden", watched)
    trainer.create("r", spec())
    run_good(trainer, sft("r", [30, 30]))
    assert seen == [(30, recompute), (30, recompute)]
