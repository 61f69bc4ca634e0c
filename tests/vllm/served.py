"""What tests of `hearth serve --engine vllm` do to it: its commands, its replicas, samples."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import tinker
from tinker import types

from server.live import LiveServer
from tests.e2e.client import MODEL, new_run, output_logprobs, prompt, sft, text, train, wait
from tests.running_server import RunningServer
from tests.vllm.material import PYTHON

KEY = "tml-any"
TOLERANCE = 1e-3
LONG = 300
"""Tokens of a sample that something is done to meanwhile."""


def hearth(server: RunningServer, *arguments: str, status: int = 0) -> str:
    """What a command on the server's data folder says."""
    done = subprocess.run(
        [sys.executable, "-m", "server.cli", *arguments, "--data", str(server.data)],
        capture_output=True,
        text=True,
        env={**os.environ, "COLUMNS": "240"},
    )
    assert done.returncode == status, done.stderr
    return done.stdout + done.stderr


def replicas(server: RunningServer) -> list[dict[str, Any]]:
    live = LiveServer.find(server.data)
    assert live is not None
    return live.get("replicas")


def tell_all(server: RunningServer, what: str) -> None:
    """As `hearth replicas` does, without the time that a command takes to start."""
    live = LiveServer.find(server.data)
    assert live is not None
    for row in replicas(server):
        live.post(f"replicas/{row['name']}/{what}")


def until(condition: Callable[[], object]) -> None:
    """The test's own time limit ends what never comes true."""
    while not condition():
        time.sleep(0.05)


def kill_replica(row: dict[str, Any]) -> None:
    port = row["url"].rpartition(":")[2]
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and entry.joinpath("cmdline").exists():
            words = entry.joinpath("cmdline").read_bytes().decode().split("\0")
            if "--port" in words and port in words and str(PYTHON) in words:
                os.killpg(os.getpgid(int(entry.name)), signal.SIGKILL)
                return
    raise AssertionError(f"no vLLM listens on {port}")


def trained(service: tinker.ServiceClient, seed: int, **options: Any) -> tinker.TrainingClient:
    """A run whose weights have moved."""
    run = new_run(service, seed=seed, **options)
    train(run, steps=3, data=[sft(text(seed))])
    return run


def on_base(service: tinker.ServiceClient) -> tinker.SamplingClient:
    return wait(service.create_sampling_client(base_model=MODEL))


def check(run: tinker.TrainingClient, start: Sequence[int], sample: types.SampledSequence) -> None:
    """The sample's logprobs are those that the trainer computes for the same tokens."""
    tokens = [*start, *sample.tokens]
    output = wait(run.forward([sft(tokens)], "cross_entropy"))
    expected = output_logprobs(output)[-len(sample.tokens) :]
    assert np.abs(np.array(sample.logprobs) - expected).max() < TOLERANCE


def ask(sampler: tinker.SamplingClient, seed: int, max_tokens: int = LONG) -> Any:
    params = types.SamplingParams(max_tokens=max_tokens, seed=seed, temperature=1.0, stop=[])
    return sampler.sample(prompt(text(seed)), 1, params)


class Flow:
    """Samples that are asked for, some at a time, as long as the block lasts; even seeds of the
    first sampler, odd ones of the second. Whatever fails fails the block."""

    def __init__(self, samplers: Sequence[tinker.SamplingClient]) -> None:
        self.samples: list[tuple[int, types.SampledSequence]] = []
        self._samplers = samplers
        self._over = threading.Event()
        self._pool = ThreadPoolExecutor(6)
        self._workers: list[Future[None]] = []

    def __enter__(self) -> Flow:
        self._workers = [self._pool.submit(self._work, first) for first in range(6)]
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._pool.shutdown()
        for worker in self._workers:
            worker.result()

    def grows(self) -> None:
        """Returns when more samples were finished than are under way at a time."""
        enough = len(self.samples) + 7
        until(lambda: len(self.samples) >= enough)

    def _work(self, seed: int) -> None:
        while not self._over.is_set():
            future = ask(self._samplers[seed % 2], seed)
            self.samples.append((seed, future.result(timeout=600).sequences[0]))
            seed += 6
