"""A small tenant's steps while another has 200 batches waiting, over its steps alone.

Two clients with a key each, in a process each: what the SDK does for the flood must not slow the
other. The flood's is started as `python -m tests.benchmarks.flood URL KEY`.
"""

from __future__ import annotations

import statistics
import subprocess
import sys
from collections.abc import Generator, Iterator
from contextlib import contextmanager

import numpy as np
import tinker
from tinker import types

from server.settings import Settings
from tests.benchmarks.measure import percentile, wall_seconds
from tests.benchmarks.report import Row
from tests.benchmarks.scale import MODEL_NAME, Scale
from tests.benchmarks.served import client, serving
from tests.e2e.client import sft
from tests.running_server import RunningServer

BATCHES = 200
FLOOD, SMALL = (128,) * 4, (64,)
"""Lengths in tokens of the sequences in a batch of the flood, and of the small tenant."""
RANK = 8
MICROBATCH_TOKENS = Settings.model_fields["max_tokens_per_microbatch"].default


def rows(scale: Scale) -> Iterator[Row]:
    with (
        serving({MODEL_NAME: scale.model}, scale.threads, ("small", "flood")) as server,
        client(server, "small") as service,
    ):
        run = _run(service)
        microbatch = [128] * (MICROBATCH_TOKENS // 128)
        _step_s(run, microbatch)
        microbatch_s = statistics.median(_pass_s(run, microbatch) for _ in range(3))
        alone = [_step_s(run, SMALL) for _ in range(scale.flooded_steps)]
        with _flood(server) as flood:
            flooded = [_step_s(run, SMALL) for _ in range(scale.flooded_steps)]
            assert flood.poll() is None, "the flood was over before the small tenant's steps were"
    yield _row(alone, flooded, microbatch_s)


def _row(alone: list[float], flooded: list[float], microbatch_s: float) -> Row:
    alone_p95, flooded_p95 = percentile(alone, 0.95), percentile(flooded, 0.95)
    return Row(
        name="flooded-over-alone",
        what=f"small tenant's p95 step beside {BATCHES} waiting batches / alone",
        value=flooded_p95 / alone_p95,
        low=min(flooded) / alone_p95,
        high=max(flooded) / alone_p95,
        # Twice as long as alone, and one microbatch.
        target=2 + microbatch_s / alone_p95,
        details={
            "alone_p95_s": alone_p95,
            "flooded_p50_s": percentile(flooded, 0.5),
            "flooded_p95_s": flooded_p95,
            "microbatch_s": microbatch_s,
        },
    )


def _run(service: tinker.ServiceClient) -> tinker.TrainingClient:
    return service.create_lora_training_client(MODEL_NAME, rank=RANK, seed=0).result()


def _batch(lengths: tuple[int, ...] | list[int]) -> list[types.Datum]:
    rng = np.random.default_rng(0)
    return [sft(rng.integers(100, 1000, length + 1).tolist()) for length in lengths]


def _pass_s(run: tinker.TrainingClient, lengths: list[int]) -> float:
    data = _batch(lengths)
    return wall_seconds(lambda: run.forward_backward(data, "cross_entropy").result())


def _step_s(run: tinker.TrainingClient, lengths: tuple[int, ...] | list[int]) -> float:
    """Both requests sent at once, until both are done."""
    data = _batch(lengths)

    def step() -> None:
        passed = run.forward_backward(data, "cross_entropy")
        stepped = run.optim_step(types.AdamParams(learning_rate=1e-4))
        passed.result()
        stepped.result()

    return wall_seconds(step)


@contextmanager
def _flood(server: RunningServer) -> Generator[subprocess.Popen[str]]:
    """The other tenant, from when all its batches are sent."""
    command = [sys.executable, "-m", "tests.benchmarks.flood", server.url, server.keys["flood"]]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        process.stdout.readline()
        yield process
        process.kill()


def _send_flood(url: str, key: str) -> None:
    with tinker.ServiceClient(base_url=url, api_key=key) as service:
        run, data = _run(service), _batch(FLOOD)
        futures = [run.forward_backward(data, "cross_entropy") for _ in range(BATCHES)]
        futures[0].result()
        print("under way", flush=True)
        for future in futures:
            future.result()


if __name__ == "__main__":
    _send_flood(*sys.argv[1:])
