"""The `hearth` command, up to where a server would start."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from server import cli
from server.cli import app
from server.live import LiveServer, withdraw

runner = CliRunner()


@pytest.fixture(autouse=True)
def elsewhere(data: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(data)
    monkeypatch.setenv("HEARTH_DATA", str(data))
    monkeypatch.setenv("COLUMNS", "200")
    return data


def run(*arguments: str) -> Any:
    return runner.invoke(app, list(arguments))


def test_a_key_is_shown_once_listed_by_name_and_revoked():
    made = run("keys", "create", "ann", "--project", "apollo")
    assert made.exit_code == 0
    key = made.output.strip()
    assert key.startswith("tml-")

    listed = run("keys", "list").output
    assert "ann" in listed
    assert "apollo" in listed
    assert "valid" in listed
    assert key not in listed

    assert run("keys", "revoke", "ann").output == "revoked 1 key\n"
    assert "revoked" in run("keys", "list").output
    assert run("keys", "revoke", "ann").exit_code == 1


def test_names_are_shown_as_they_are():
    run("keys", "create", ":train:[bold]")
    assert ":train:[bold]" in run("keys", "list").output


def test_serving_needs_a_model(elsewhere: Path):
    assert run("serve").exit_code == 2


@pytest.mark.parametrize("model", ["name", "=path", "name=", "org/name=/nowhere"])
def test_a_model_is_a_name_and_a_folder_that_holds_one(model: str):
    result = run("serve", "--model", model)
    assert result.exit_code == 2
    assert "--model" in result.output


def test_flags_become_settings(elsewhere: Path, monkeypatch: pytest.MonkeyPatch):
    (elsewhere / "config.json").write_text("{}")
    served = []
    monkeypatch.setattr(cli.serving, "serve", lambda settings: served.append(settings) or 3)
    flags = ["--port", "0", "--threads", "2", "--trainer-groups", "3"]
    result = run("serve", "--model", f"org/name={elsewhere}", *flags)
    assert result.exit_code == 3
    [settings] = served
    assert settings.models == {"org/name": elsewhere.resolve()}
    assert (settings.port, settings.threads, settings.data) == (0, 2, elsewhere)
    assert settings.trainer_groups == 3


@pytest.mark.parametrize("command", ["serve", "doctor"])
def test_a_wrong_setting_is_told_without_a_traceback(elsewhere: Path, command: str):
    (elsewhere / "hearth.toml").write_text("prot = 1\n")
    result = run(command)
    assert result.exit_code == 2
    assert "prot" in result.output
    assert "Traceback" not in result.output


def test_the_doctor_runs_without_a_model():
    result = run("doctor")
    assert result.exit_code == 0
    assert "Features" in result.output


@pytest.mark.parametrize(
    "command",
    [
        "trainers list",
        "trainers drain t",
        "trainers resume t",
        "trainers move r",
        "replicas list",
        "replicas pause r",
        "replicas drain r",
        "replicas resume r",
        "maintenance on",
    ],
)
def test_a_server_that_does_not_run_cannot_be_operated(command: str, data: Path):
    done = run(*command.split())
    assert done.exit_code == 1
    assert f"hearth: no server runs on the data folder {data}" in done.output


def test_a_server_that_is_gone_leaves_nothing_to_operate(data: Path):
    LiveServer("http://127.0.0.1:1", "token").announce(data)
    assert (data / "operator.token").read_text() == "token"
    assert (data / "operator.token").stat().st_mode & 0o077 == 0
    assert run("maintenance", "on").exit_code == 1
    withdraw(data)
    assert LiveServer.find(data) is None
    assert not (data / "operator.token").exists()
