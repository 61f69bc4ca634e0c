"""Many live runs on one server, and a step of each, all sent before any is waited for: what a run
costs in time and in memory. The design sets a target in `many_adapters.py`, none here."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil
import torch

from backends.lora.adapter import fresh_adapter
from backends.model import FrozenModel
from tests.benchmarks.loads import adapter
from tests.benchmarks.measure import wall_seconds
from tests.benchmarks.report import Row
from tests.benchmarks.scale import Scale
from tests.benchmarks.served import NO_KEY, serving
from tests.e2e.client import MODEL, Raw, sft
from tests.tiny_models import tiny_llama, with_tokenizer

RANK = 8
CONNECTIONS = 8
DATA = [sft(list(range(40, 57)))]


class Crowd:
    """Clients without an SDK, a thread and a connection each, which share the runs evenly."""

    def __init__(self, url: str) -> None:
        self._clients = [Raw(url, NO_KEY) for _ in range(CONNECTIONS)]
        self._pool = ThreadPoolExecutor(CONNECTIONS)

    def create(self, count: int) -> list[list[str]]:
        """So many runs of each client, each run in a session of its own."""
        made = self._pool.map(lambda c: [c.run(rank=RANK) for _ in range(count)], self._clients)
        return list(made)

    def step(self, runs: Sequence[Sequence[str]]) -> None:
        sent = list(self._pool.map(_send_steps, self._clients, runs))
        list(self._pool.map(_wait, self._clients, sent))


def rows(scale: Scale) -> Iterator[Row]:
    each = scale.service_runs // CONNECTIONS
    count = each * CONNECTIONS
    with tempfile.TemporaryDirectory() as folder:
        model = with_tokenizer(tiny_llama(Path(folder)))
        state = _state_bytes(model)
        with serving({MODEL: model}, threads=1) as server:
            crowd = Crowd(server.url)
            crowd.step(crowd.create(1))  # what the first runs make, all later ones share
            worker = psutil.Process(server.worker_pids()[0])
            before = worker.memory_info().rss
            runs: list[list[str]] = []
            create_s = wall_seconds(lambda: runs.extend(crowd.create(each)))
            step_s = wall_seconds(lambda: crowd.step(runs))
            grown = (worker.memory_info().rss - before) / count
    yield _once(
        "live-runs-memory",
        f"{count:,} live runs: memory of each / its adapter and moments",
        grown / state,
        run_kib=grown / 1024,
        state_kib=state / 1024,
    )
    yield _once(
        "live-runs-time",
        f"{count:,} live runs: seconds to create them and step each",
        create_s + step_s,
        unit="s",
        create_s=create_s,
        step_s=step_s,
    )


def _state_bytes(path: Path) -> int:
    """What a run must weigh: its adapter and two moments of it, all float32."""
    model = FrozenModel.load(path, torch.float32, torch.device("cpu"))
    made = fresh_adapter(adapter(RANK), model.targets, model.device)
    return 3 * 4 * sum(tensor.numel() for _, tensor in made.named_tensors())


def _send_steps(client: Raw, runs: Sequence[str]) -> list[str]:
    passes = [client.forward_backward(run, 1, DATA) for run in runs]
    return passes + [client.optim_step(run, 2) for run in runs]


def _wait(client: Raw, requests: Sequence[str]) -> None:
    for request in requests:
        answer = client.outcome(request)
        assert answer.status_code == 200, answer.text


def _once(name: str, what: str, value: float, unit: str = "x", **details: float) -> Row:
    """A figure of one round, so without a spread."""
    return Row(name=name, what=what, value=value, low=value, high=value, unit=unit, details=details)
