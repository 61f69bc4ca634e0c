"""One tenant's SFT steps through the whole service, over a bare loop of torch and PEFT.

Both start from one adapter, train on the same batch, and take their steps in turn; their losses
must agree, or the comparison says nothing.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Generator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import tinker
from tinker import types

from tests.benchmarks.measure import in_turn
from tests.benchmarks.recipe import BETAS, EPS, LEARNING_RATE, RANK, batch
from tests.benchmarks.report import Row, ratio_row
from tests.benchmarks.scale import MODEL_NAME, Scale
from tests.benchmarks.served import NO_KEY, client, processor_seconds_of, serving
from tests.e2e.client import download, sft
from tests.running_server import RunningServer

TARGET = 1.10
LOSS_TOLERANCE = 1e-3
"""Between two losses of the same step, relative."""


@dataclass
class Side:
    """What the steps of one side came to, the one that warms up included."""

    losses: list[float] = field(default_factory=list)
    processor_s: list[float] = field(default_factory=list)

    def add(self, loss: float, processor_s: float) -> None:
        self.losses.append(loss)
        self.processor_s.append(processor_s)


def rows(scale: Scale) -> Iterator[Row]:
    served, bare = Side(), Side()
    with serving({MODEL_NAME: scale.model}, scale.threads) as server, client(server) as service:
        run = service.create_lora_training_client(MODEL_NAME, rank=RANK, seed=0).result()
        data = [sft(tokens) for tokens in batch(_vocab_size(scale.model)).tolist()]
        with _bare_loop(scale, server, run) as loop:
            sides = [lambda: _served_step(server, run, data, served), lambda: _step(loop, bare)]
            served_s, bare_s = in_turn(sides, scale.rounds)
    _check_losses(served.losses, bare.losses)
    yield ratio_row(
        "service-over-bare-loop",
        "one tenant's SFT step through the service / bare torch + PEFT",
        served_s,
        bare_s,
        TARGET,
    )
    yield ratio_row(
        "service-over-bare-loop-processor",
        "the same in processor time, of server, worker and SDK / bare",
        served.processor_s[1:],
        bare.processor_s[1:],
        TARGET,
    )


def _vocab_size(model: Path) -> int:
    return json.loads((model / "config.json").read_bytes())["vocab_size"]


@contextmanager
def _bare_loop(
    scale: Scale, server: RunningServer, run: tinker.TrainingClient
) -> Generator[subprocess.Popen[str]]:
    """A process that starts where `run` stands."""
    with tempfile.TemporaryDirectory() as folder:
        saved = run.save_weights_external("start").result()
        rest = tinker.RestClient(base_url=server.url, api_key=NO_KEY)
        adapter = download(rest, saved.path, Path(folder) / "adapter")
        command = [sys.executable, "-W", "ignore", "-m", "tests.benchmarks.bare_loop"]
        command += ["--model", str(scale.model), "--adapter", str(adapter)]
        command += ["--threads", str(scale.threads)]
        with subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        ) as process:
            yield process
            process.terminate()


def _served_step(
    server: RunningServer, run: tinker.TrainingClient, data: Sequence[types.Datum], side: Side
) -> float:
    """Both requests are sent at once, as every loop of the cookbook does."""
    adam = types.AdamParams(
        learning_rate=LEARNING_RATE, beta1=BETAS[0], beta2=BETAS[1], eps=EPS, weight_decay=0.0
    )
    pids = [server.pid, *server.worker_pids()]
    used, began = processor_seconds_of(pids) + time.process_time(), time.perf_counter()
    passed, stepped = run.forward_backward(list(data), "cross_entropy"), run.optim_step(adam)
    loss = passed.result().metrics["loss:sum"]
    stepped.result()
    wall = time.perf_counter() - began
    side.add(loss, processor_seconds_of(pids) + time.process_time() - used)
    return wall


def _step(loop: subprocess.Popen[str], side: Side) -> float:
    assert loop.stdin is not None
    assert loop.stdout is not None
    loop.stdin.write("\n")
    loop.stdin.flush()
    answer = json.loads(loop.stdout.readline())
    side.add(answer["loss"], answer["processor_s"])
    return answer["wall_s"]


def _check_losses(served: Sequence[float], bare: Sequence[float]) -> None:
    if not np.allclose(served, bare, rtol=LOSS_TOLERANCE, atol=0):
        raise AssertionError(f"the two runs do not compute the same: {served} and {bare}")
