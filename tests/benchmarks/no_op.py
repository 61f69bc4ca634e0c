"""What the service adds to a request that computes next to nothing. A difference, not a ratio."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import tinker

from tests.benchmarks.measure import percentile, wall_seconds
from tests.benchmarks.report import Row
from tests.benchmarks.scale import Scale
from tests.benchmarks.served import client, processor_seconds_of, serving
from tests.e2e.client import sft
from tests.tiny_models import tiny_llama, with_tokenizer

TARGET_MS = 15.0
MODEL = "tiny/llama"
WARM_UP = 20


def rows(scale: Scale) -> Iterator[Row]:
    with (
        tempfile.TemporaryDirectory() as folder,
        serving({MODEL: with_tokenizer(tiny_llama(Path(folder)))}, threads=1) as server,
        client(server) as service,
    ):
        run = service.create_lora_training_client(MODEL, rank=8, seed=0).result()
        for _ in range(WARM_UP):
            _request(run)
        pids = [*server.worker_pids(), server.pid, os.getpid()]
        used = [processor_seconds_of([pid]) for pid in pids]
        taken = [1000 * wall_seconds(lambda: _request(run)) for _ in range(scale.requests)]
        computing, answering, asking = (
            1000 * (processor_seconds_of([pid]) - before) / scale.requests
            for pid, before in zip(pids, used, strict=True)
        )
    median, p95 = (percentile(taken, share) for share in (0.5, 0.95))
    yield Row(
        name="no-op-request",
        what="no-op request through the SDK, p50 less the worker's own time",
        value=median - computing,
        low=min(taken) - computing,
        high=p95 - computing,
        target=TARGET_MS,
        unit="ms",
        details={
            "p50_ms": median,
            "p95_ms": p95,
            "worker_processor_ms": computing,
            "server_processor_ms": answering,
            "sdk_processor_ms": asking,
        },
    )


def _request(run: tinker.TrainingClient) -> None:
    """Submit to result: one datum of two tokens."""
    run.forward_backward([sft([1, 2, 3])], "cross_entropy").result()
