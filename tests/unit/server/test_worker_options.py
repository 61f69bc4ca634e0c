"""What the settings say of a worker reaches the trainer in it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from backends.contract import BackendError
from backends.model import FrozenModel
from backends.workers import main
from backends.workers.subprocess import SubprocessBackend
from server import app
from server.settings import Settings
from tests.tiny_models import tiny_llama, with_tokenizer
from tests.unit.backends.material import run_good, sft, spec


async def test_trainer_groups_share_the_cores_and_have_logs_of_their_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    started: list[tuple[object, str]] = []

    async def start(path: Path, **options: object) -> None:
        log_file = options["log_file"]
        assert isinstance(log_file, Path)
        started.append((options["threads"], log_file.name))

    monkeypatch.setattr(SubprocessBackend, "start", start)
    monkeypatch.setattr(app.os, "cpu_count", lambda: 7)
    settings = Settings(data=tmp_path, trainer_groups=3)
    for number in range(3):
        await app._worker(settings, "org/name", tmp_path, number)()
    assert started == [
        (2, "worker-org--name.log"),
        (2, "worker-org--name-1.log"),
        (2, "worker-org--name-2.log"),
    ]


@pytest.mark.parametrize(("checkpointing", "recompute"), [("on", True), ("off", False)])
async def test_a_worker_is_started_with_what_the_settings_say(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, checkpointing: str, recompute: bool
):
    words: list[str] = []
    environment: dict[str, str] = {}

    async def spawn(options: dict[str, object], log: object, variables: dict[str, str]) -> None:
        words.extend(str(word) for option in options.items() for word in option)
        environment.update(variables)
        raise BackendError("that will do")

    monkeypatch.setattr(SubprocessBackend, "_spawn", spawn)
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
    with pytest.raises(BackendError, match="that will do"):
        await app._worker(settings, "org/name", path, 0)()
    assert environment == {"CUDA_VISIBLE_DEVICES": "2,3"}
    arguments = main.parse([*words, "--fd", "0"])
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
