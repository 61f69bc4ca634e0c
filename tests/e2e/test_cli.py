"""Every command of the `tinker` CLI but `checkpoint push-hf`, which needs a model hub. The last
test says that none is missing."""

from __future__ import annotations

import csv
import json
import os
import pty
import subprocess
import sys
from contextlib import chdir
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
import tinker
from click.testing import CliRunner, Result
from tinker.cli.__main__ import main_cli

from tests.e2e.client import DATA, MODEL, fresh, new_run, train, wait
from tests.running_server import RunningServer

ALICE = "tml:organization_user:alice"
TIMEOUT_S = 90


@dataclass
class Cli:
    """`tinker` with a home of its own. Each command runs in this process, as a new one takes
    seconds to import the SDK; what asks for a terminal gets both."""

    url: str
    home: Path
    key: str | None

    def __call__(self, *words: str) -> str:
        """What it printed; it must have gone well."""
        done = self.run(*words)
        assert done.exit_code == 0, (done.output, done.exception)
        return done.stdout

    def json(self, *words: str) -> Any:
        return json.loads(self("-f", "json", *words))

    def run(self, *words: str) -> Result:
        with chdir(self.home):
            return CliRunner().invoke(main_cli, words, env=self.environment)

    def in_a_terminal(self, *words: str, typed: str) -> str:
        """Everything that a terminal showed while that was typed at its first question."""
        master, slave = pty.openpty()
        command = [sys.executable, "-m", "tinker.cli", *words]
        environment = {name: value for name, value in self.environment.items() if value}
        process = subprocess.Popen(
            command, stdin=slave, stdout=slave, stderr=slave, env={**os.environ, **environment}
        )
        os.close(slave)
        shown = b""
        try:
            while b"Paste your API key: " not in shown:
                shown += os.read(master, 1024)
            os.write(master, typed.encode() + b"\r")
            while part := _read(master):
                shown += part
            process.wait(TIMEOUT_S)
        finally:
            process.kill()
            process.wait()
            os.close(master)
        return shown.decode()

    @property
    def environment(self) -> dict[str, str | None]:
        return {
            "TINKER_BASE_URL": self.url,
            "TINKER_API_KEY": self.key,
            "HOME": str(self.home),
            "COLUMNS": "200",
        }


@dataclass
class Work:
    run: tinker.TrainingClient
    state: str
    exported: str

    @property
    def session(self) -> str:
        return self.run.model_id.split(":")[0]


@pytest.fixture
def cli(server: RunningServer, tmp_path: Path) -> Cli:
    return Cli(server.url, tmp_path, server.keys["alice"])


@pytest.fixture(scope="module")
def work(service: tinker.ServiceClient) -> Work:
    run = new_run(service)
    train(run, 1)
    state = wait(run.save_state(fresh("cli"))).path
    return Work(run, state, wait(run.save_weights_external(fresh("cli"))).path)


def test_version(cli: Cli) -> None:
    assert tinker.__version__ in cli("version")


def test_model_list(cli: Cli) -> None:
    assert MODEL in cli("model", "list")
    assert MODEL in cli("model", "list", "LLAMA")
    missing = cli.run("model", "list", "no-such-model")
    assert missing.exit_code != 0
    assert "tml:organization:" in str(missing.exception)


def test_auth_status_and_whoami(cli: Cli) -> None:
    assert "Tinker accessible: yes" in cli("auth", "status")
    assert cli.json("auth", "whoami")["user_urn"] == ALICE


def test_auth_login_and_logout_in_a_terminal(server: RunningServer, tmp_path: Path) -> None:
    cli = Cli(server.url, tmp_path, None)
    key = server.keys["alice"]
    printed = cli.in_a_terminal("auth", "login", typed=key)
    assert "Logged in as alice@" in printed
    assert key not in printed
    # From now on without a key in the environment.
    assert "Tinker accessible: yes" in cli("auth", "status")
    assert "Removed credential" in cli("auth", "logout")
    assert cli.run("auth", "status").exit_code != 0


def test_auth_login_with_a_wrong_key_says_so(server: RunningServer, tmp_path: Path) -> None:
    cli = Cli(server.url, tmp_path, None)
    printed = cli.in_a_terminal("auth", "login", typed="tml-wrong")
    assert "the API key is unknown or revoked" in printed


def test_run_list_and_info(cli: Cli, work: Work) -> None:
    runs = cli.json("run", "list", "--limit", "0")["runs"]
    assert work.run.model_id in [run["training_run_id"] for run in runs]
    assert MODEL in cli("run", "info", work.run.model_id)


def test_checkpoint_list_and_info(cli: Cli, work: Work) -> None:
    every = cli.json("checkpoint", "list", "--limit", "0")["checkpoints"]
    of_run = cli.json("checkpoint", "list", "--run-id", work.run.model_id)["checkpoints"]
    for found in (every, of_run):
        assert work.state in [one["tinker_path"] for one in found]
    assert cli.json("checkpoint", "info", work.state)["tinker_path"] == work.state


def test_checkpoint_publish_unpublish_and_set_ttl(cli: Cli, work: Work) -> None:
    cli("checkpoint", "publish", work.state)
    assert cli.json("checkpoint", "info", work.state)["public"]
    cli("checkpoint", "unpublish", work.state)
    assert not cli.json("checkpoint", "info", work.state)["public"]
    cli("checkpoint", "set-ttl", work.state, "--ttl", "7200")
    assert cli.json("checkpoint", "info", work.state)["expires_at"]
    cli("checkpoint", "set-ttl", work.state, "--remove")
    assert not cli.json("checkpoint", "info", work.state)["expires_at"]


def test_checkpoint_delete(cli: Cli, work: Work) -> None:
    paths = [wait(work.run.save_state(fresh("cli"))).path for _ in range(3)]
    cli("checkpoint", "delete", *paths, "--yes")
    left = cli.json("checkpoint", "list", "--run-id", work.run.model_id)["checkpoints"]
    assert not set(paths) & {one["tinker_path"] for one in left}


def test_checkpoint_download(cli: Cli, work: Work, rest: tinker.RestClient) -> None:
    for path in (work.state, work.exported):
        answer = cli.json("checkpoint", "download", path, "-o", str(cli.home / "downloads"))
        files = {file.name for file in Path(answer["destination"]).iterdir()}
        assert files == {"adapter_config.json", "adapter_model.safetensors"}
    # A training checkpoint went through an export of its own, which is gone again.
    every = wait(rest.list_user_checkpoints(limit=1000)).checkpoints
    assert not [one for one in every if one.checkpoint_id.endswith("/download")]


def test_session_export_trace(cli: Cli, work: Work) -> None:
    cli("session", "export-trace", work.session, "-o", "trace.pftrace")
    assert json.loads((cli.home / "trace.pftrace").read_text())["traceEvents"]
    assert "http" in cli("session", "export-trace", work.session, "--url-only")


def test_billing_usage_and_checkpoint_storage(cli: Cli, work: Work) -> None:
    wait(work.run.forward(DATA, "cross_entropy"))
    hour = datetime.now(UTC).replace(minute=0, second=0, microsecond=0)
    window = [(hour + timedelta(hours=by)).isoformat() for by in (-1, 1)]
    assert MODEL in cli("billing", "usage", *window)
    rows = csv.DictReader(cli("billing", "usage", *window, "--csv", "-").splitlines())
    assert work.session in {row["session_id"] for row in rows}
    storage = cli.json("billing", "checkpoint-storage")["data"]
    assert sum(row["checkpoint_count"] for row in storage) > 0
    assert "alice" in cli("billing", "checkpoint-storage")


def test_every_command_is_tested_here() -> None:
    source = Path(__file__).read_text()
    context = main_cli.make_context("tinker", ["version"])
    for group in main_cli.list_commands(context):
        found = main_cli.get_command(context, group)
        for command in getattr(found, "commands", {}):
            if command != "push-hf":
                assert f'"{group}", "{command}"' in source, (group, command)


def _read(terminal: int) -> bytes:
    try:
        return os.read(terminal, 1024)
    except OSError:  # its other side is closed
        return b""
