"""`hearth doctor --plan`: what it takes, finds out by itself, prints and refuses."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from server.cli import app
from tests.unit.planning.configs import QWEN3_4B, QWEN3_30B_A3B


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    return tmp_path


@pytest.fixture
def model(tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(QWEN3_4B))
    return folder


def run(*arguments: object) -> Any:
    return CliRunner().invoke(app, ["doctor", "--plan", *map(str, arguments)])


def test_a_table_for_each_backend_and_one_sentence(model: Path):
    done = run(model, "--gpus", 4)
    assert done.exit_code == 0
    for part in ("local: 1 GPU", "fsdp: 2 GPUs", "megatron: 2 GPUs", "base", "optimizer", "7.49"):
        assert part in done.output
    last = done.output.strip().splitlines()[-1]
    assert last.startswith(f"For {model} on 4 GPUs of 139.0 GiB, start with `hearth serve")


def test_a_file_and_a_name_of_the_settings_do_as_well(model: Path, elsewhere: Path):
    (elsewhere / "hearth.toml").write_text(f'[models]\n"org/name" = "{model}"\n')
    for given in (model / "config.json", "org/name"):
        done = run(given, "--gpus", 2)
        assert done.exit_code == 0
        assert f"For {given} on 2 GPUs" in done.output


def test_gpus_are_found_where_there_are_some(model: Path, elsewhere: Path):
    (elsewhere / "bin").mkdir()
    program = elsewhere / "bin" / "nvidia-smi"
    program.write_text("#!/bin/sh\necho 81920\necho 81920\n")
    program.chmod(0o755)
    assert "on 2 GPUs of 80.0 GiB" in run(model).output
    assert "on 3 GPUs of 80.0 GiB" in run(model, "--gpus", 3).output
    assert "on 2 GPUs of 40.0 GiB" in run(model, "--gpu-memory", 40).output
    program.write_text("#!/bin/sh\nexit 9\n")
    done = run(model)
    assert done.exit_code == 1
    assert "nvidia-smi does not tell the memory" in done.output


def test_fewer_numbers_take_less(model: Path):
    few = run(model, "--gpus", 1, "--runs", 1, "--rank", 8, "--train", "attn").output
    assert "1 run of rank 8" in few
    assert "engine_max_lora_rank = 8" in few
    assert "--dtype float32" in run(model, "--gpus", 2, "--dtype", "float32").output


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["nowhere"], "--plan 'nowhere' is no base model of the settings, no folder"),
        (["model", "--train", "attn,all"], "--train 'attn,all': 'all' is none of attn, mlp"),
        (["model", "--dtype", "int8"], "--dtype 'int8' is none of float32, bfloat16"),
        (["broken.json"], "broken.json cannot be read"),
        (["list.json"], "list.json holds no JSON object"),
        (["other.json"], "model_type 'mamba' is none of"),
    ],
)
def test_what_cannot_be_planned_is_one_sentence(
    model: Path, elsewhere: Path, arguments: list[str], words: str
):
    (elsewhere / "broken.json").write_text("{")
    (elsewhere / "list.json").write_text("[]")
    (elsewhere / "other.json").write_text('{"model_type": "mamba"}')
    done = run(*arguments)
    assert done.exit_code == 1
    assert words in done.output
    assert done.output.count("\n") == 1
    assert "Traceback" not in done.output


def test_what_fits_nowhere_is_refused_in_one_sentence(elsewhere: Path):
    (elsewhere / "moe.json").write_text(json.dumps(QWEN3_30B_A3B))
    done = run("moe.json", "--gpus", 2)
    assert done.exit_code == 1
    assert "moe.json does not fit on 2 GPUs of 139.0 GiB with 8 runs of rank 32" in done.output
    assert "--expert-parallel" in run("moe.json", "--gpus", 8).output
