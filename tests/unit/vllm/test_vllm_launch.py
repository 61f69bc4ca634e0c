from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from backends.sampling.vllm import assemble, client, guard, process
from backends.sampling.vllm.launch import (
    LaunchSettings,
    command,
    core_sets,
    environment,
    lora_rank_limit,
)
from backends.sampling.vllm.process import LocalServer, reserved_port
from backends.workers.subprocess import Log
from tests.tiny_models import tiny_llama, with_tokenizer


@pytest.mark.parametrize(("rank", "limit"), [(1, 1), (2, 8), (32, 32), (33, 64), (512, 512)])
def test_the_limit_of_ranks_is_one_that_vllm_takes(rank: int, limit: int):
    assert lora_rank_limit(rank) == limit


def test_a_rank_beyond_all_limits_is_refused():
    with pytest.raises(ValueError, match="512, not 513"):
        lora_rank_limit(513)


def test_replicas_have_cores_of_their_own_as_far_as_there_are_enough():
    assert core_sets(range(4), 2) == [(0, 1), (2, 3)]
    assert core_sets([5, 7, 9], 2) == [(5,), (7,)]
    assert core_sets([0, 1], 3) == [(0,), (1,), (0,)]


GPU = LaunchSettings(model=Path("model"), python=Path("python"), max_model_len=512, on_cpu=False)


def option(words: list[str], name: str) -> str | None:
    return words[words.index(name) + 1] if name in words else None


def test_a_server_sees_its_devices_and_is_spread_over_them(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1,2,3")
    own = replace(GPU, devices="2,3")
    assert environment(own, [])["CUDA_VISIBLE_DEVICES"] == "2,3"
    assert option(command(own, 1), "--tensor-parallel-size") == "2"
    assert option(command(replace(GPU, devices="2"), 1), "--tensor-parallel-size") == "1"


def test_without_devices_of_its_own_a_server_sees_what_we_see(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1,2,3")
    assert environment(GPU, [])["CUDA_VISIBLE_DEVICES"] == "0,1,2,3"
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    assert "CUDA_VISIBLE_DEVICES" not in environment(GPU, [])
    assert option(command(GPU, 1), "--tensor-parallel-size") is None


def test_a_server_takes_the_share_of_a_gpu_that_is_its_own():
    share = "--gpu-memory-utilization"
    assert option(command(replace(GPU, gpu_memory_utilization=0.45), 1), share) == "0.45"
    assert option(command(GPU, 1), share) is None


def test_each_server_is_started_on_devices_of_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    started: list[str | None] = []
    monkeypatch.setattr(assemble, "_local", lambda launch, *_: started.append(launch.devices))
    model = with_tokenizer(tiny_llama(tmp_path / "model"))
    launch, names = replace(GPU, model=model), ["replica-0", "replica-1"]
    for devices in (["2", "3,4"], []):
        assemble.assemble(launch, names=names, urls=[], folder=tmp_path, devices=devices)
    assert started == ["2", "3,4", None, None]


def test_a_port_is_nobody_elses_until_its_server_listens():
    with reserved_port() as port:
        with socket.socket() as other, pytest.raises(OSError):
            other.bind(("127.0.0.1", port))
        with socket.socket() as server:
            server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            server.bind(("127.0.0.1", port))
            server.listen()
            with socket.create_connection(("127.0.0.1", port)), server.accept()[0]:
                pass


def guarded(*command: str) -> subprocess.Popen[bytes]:
    words = [sys.executable, "-I", str(Path(guard.__file__)), *command]
    return subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, process_group=0)


def test_a_server_ends_when_whoever_started_it_is_gone():
    process = guarded(sys.executable, "-c", "import time; print('up', flush=True); time.sleep(600)")
    with process:
        assert process.stdout is not None
        assert process.stdin is not None
        assert process.stdout.readline() == b"up\n"
        process.stdin.close()
        # Its output is closed when the last of the group is gone.
        assert process.stdout.read() == b""
        assert process.wait() == -signal.SIGKILL


def test_a_servers_end_and_its_signals_are_passed_on():
    with guarded(sys.executable, "-c", "raise SystemExit(7)") as process:
        assert process.wait() == 7
    with guarded(sys.executable, "-c", "print(flush=True); input()") as process:
        assert process.wait() == 1  # its own standard input is empty
    script = "import time; print(flush=True); time.sleep(600)"
    with guarded(sys.executable, "-c", script) as process:
        assert process.stdout is not None
        process.stdout.readline()
        os.killpg(process.pid, signal.SIGTERM)
        assert process.wait() == 128 + signal.SIGTERM


async def _server(tmp_path: Path, url: str) -> LocalServer:
    """A process that does nothing, said to answer at `url`."""
    process = await asyncio.create_subprocess_exec("sleep", "60", process_group=0)
    return LocalServer(process, url, Log(tmp_path / "log"))


async def test_a_server_that_hangs_is_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """It takes connections, as a stopped process does, and never answers."""
    monkeypatch.setattr(process, "_SILENT_S", 0.2)
    monkeypatch.setattr(process, "_WATCH_EVERY_S", 0.05)
    monkeypatch.setattr(client, "_HEALTH_S", 0.05)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        server = await _server(tmp_path, f"http://127.0.0.1:{silent.getsockname()[1]}")
        assert "has answered nothing" in await server.wait_gone()
        await server.stop()


async def test_a_server_that_ends_is_told_of_at_once(tmp_path: Path):
    server = await _server(tmp_path, "http://127.0.0.1:9")
    os.kill(server.pid, signal.SIGKILL)
    assert "ended with code -9" in await asyncio.wait_for(server.wait_gone(), 5)
    await server.stop()
