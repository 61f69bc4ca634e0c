"""A start that cannot work says why in one sentence, and ends with status 1."""

from __future__ import annotations

import socket
import subprocess
import sys
from pathlib import Path

import pytest

from server.serving import listen, lock


def hearth_serve(model: Path, data: Path, *options: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "server.cli", "serve", "--model", f"a/b={model}"]
    return subprocess.run(
        [*command, "--data", str(data), *options], capture_output=True, text=True, timeout=60
    )


@pytest.fixture
def no_model(tmp_path: Path) -> Path:
    """A folder that looks like a model until it is loaded."""
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    return tmp_path / "model"


def test_a_busy_port_is_named(no_model: Path, tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        ended = hearth_serve(no_model, tmp_path / "data", "--port", str(port))
    assert ended.returncode == 1
    assert f"hearth: cannot listen on 127.0.0.1, port {port}" in ended.stderr


def test_a_folder_that_holds_no_model_is_told_with_the_loaders_words(
    no_model: Path, tmp_path: Path
) -> None:
    ended = hearth_serve(no_model, tmp_path / "data", "--port", "0")
    assert ended.returncode == 1
    assert "hearth: the worker ended" in ended.stderr


def test_listening_where_others_can_reach_needs_a_key_first(no_model: Path, tmp_path: Path) -> None:
    ended = hearth_serve(no_model, tmp_path / "data", "--port", "0", "--host", "0.0.0.0")
    assert ended.returncode == 1
    assert "hearth: host is 0.0.0.0" in ended.stderr
    assert "hearth keys create" in ended.stderr


def test_a_second_server_on_a_data_folder_does_not_start(no_model: Path, tmp_path: Path) -> None:
    data = tmp_path / "data"
    data.mkdir()
    with lock(data):
        ended = hearth_serve(no_model, data, "--port", "0")
    assert ended.returncode == 1
    assert f"hearth: another server is running on the data folder {data}" in ended.stderr


def test_answers_leave_at_once_however_small() -> None:
    """Nagle's algorithm holds a small second write back until the first is acknowledged, which
    a client delays by up to 40 ms."""
    with (
        listen("127.0.0.1", 0) as listener,
        socket.create_connection(listener.getsockname()),
        listener.accept()[0] as connection,
    ):
        assert connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
