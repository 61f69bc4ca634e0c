"""`hearth serve --engine vllm`: the real SDK, a real server process, real vLLM replicas."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tinker
from tinker import types

from server.live import LiveServer
from tests.e2e.client import (
    MODEL,
    adam,
    generate,
    new_run,
    output_logprobs,
    prompt,
    sampler_of,
    sft,
    text,
    train,
    wait,
)
from tests.running_server import RunningServer
from tests.vllm.material import PYTHON

KEY = "tml-any"
TOLERANCE = 1e-3
LONG = 300
"""Tokens of a sample that something is done to meanwhile."""
SETTINGS = {"HEARTH_ENGINE_PYTHON": str(PYTHON), "HEARTH_ENGINE_KV_CACHE_BYTES": "100000000"}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory, base_path: Path) -> Iterator[RunningServer]:
    running = RunningServer(
        tmp_path_factory.mktemp("server") / "data",
        {MODEL: base_path},
        SETTINGS,
        options=("--engine", "vllm", "--replicas", "2"),
    )
    running.start()
    yield running
    running.kill()


@pytest.fixture(scope="module")
def service(server: RunningServer) -> tinker.ServiceClient:
    return tinker.ServiceClient(base_url=server.url, api_key=KEY)


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


def test_runs_and_the_base_model_are_sampled_at_once_each_with_its_own_weights(
    service: tinker.ServiceClient,
):
    runs = [
        trained(service, 1),
        trained(service, 2, rank=5, train_mlp=False),
        new_run(service, rank=4),
    ]
    samplers = [sampler_of(run) for run in runs[:2]]
    samplers.append(on_base(service))
    futures = [[ask(sampler, seed, 20) for seed in range(4)] for sampler in samplers]
    for run, asked in zip(runs, futures, strict=True):
        for seed, future in enumerate(asked):
            check(run, text(seed), wait(future).sequences[0])
    texts = [tuple(wait(asked[0]).sequences[0].tokens) for asked in futures]
    assert len(set(texts)) == len(texts)


def test_newer_weights_of_a_run_are_sampled_with_once_they_are_saved(
    service: tinker.ServiceClient,
):
    run = trained(service, 3)
    first = sampler_of(run)
    train(run, steps=3, data=[sft(text(4))])
    second = sampler_of(run)
    newest = generate(second, text(5), 20, seed=1, stop=[])
    check(run, text(5), newest)
    assert generate(first, text(5), 20, seed=1, stop=[]).tokens != newest.tokens


def test_a_replica_killed_in_the_middle_of_samples_is_not_noticed(
    server: RunningServer, service: tinker.ServiceClient
):
    run = trained(service, 6)
    samplers = [sampler_of(run), on_base(service)]
    base = new_run(service, rank=4)
    asked = [ask(samplers[seed % 2], seed) for seed in range(20)]
    until(lambda: max(row["load"] for row in replicas(server)) >= 5)
    victim = max(replicas(server), key=lambda row: row["load"])
    kill_replica(victim)
    for seed, future in enumerate(asked):
        sample = future.result(timeout=600).sequences[0]
        assert len(sample.tokens) == LONG
        check((run, base)[seed % 2], text(seed), sample)
    until(lambda: all(row["state"] == "ready" for row in replicas(server)))
    (row,) = [row for row in replicas(server) if row["name"] == victim["name"]]
    assert row["generation"] == victim["generation"] + 1
    assert 0 < row["lost_requests"] <= victim["load"]


def test_replicas_are_paused_drained_and_resumed_under_samples(
    server: RunningServer, service: tinker.ServiceClient
):
    run, base = trained(service, 7), new_run(service, rank=4)
    lost = [row["lost_requests"] for row in replicas(server)]
    with Flow([sampler_of(run), on_base(service)]) as flow:
        flow.grows()
        hearth(server, "replicas", "pause", "replica-0", "--mode", "keep")
        flow.grows()
        hearth(server, "replicas", "pause", "replica-1", "--mode", "abort")
        until(lambda: replicas(server)[1]["load"] == 0)
        done = len(flow.samples)
        time.sleep(1)
        assert len(flow.samples) == done
        hearth(server, "replicas", "drain", "replica-0")
        hearth(server, "replicas", "resume", "replica-1")
        flow.grows()
        until(lambda: replicas(server)[0]["load"] == 0)
        before = replicas(server)[0]["requests"]
        flow.grows()
        assert replicas(server)[0]["requests"] == before
        assert [row["state"] for row in replicas(server)] == ["draining", "ready"]
        hearth(server, "replicas", "resume", "replica-0")
        flow.grows()
    for seed, sample in flow.samples:
        assert len(sample.tokens) == LONG
        check((run, base)[seed % 2], text(seed), sample)
    listed = hearth(server, "replicas", "list")
    assert "draining" not in listed
    assert [row["lost_requests"] for row in replicas(server)] == lost


def test_nothing_begins_in_maintenance_and_nothing_fails(
    server: RunningServer, service: tinker.ServiceClient
):
    run = trained(service, 8)
    sampler = sampler_of(run)
    hearth(server, "maintenance", "on")
    sent = [row["requests"] for row in replicas(server)]
    asked = [ask(sampler, 1, 5), run.optim_step(adam())]
    time.sleep(1)
    assert not any(future.future().done() for future in asked)
    assert [row["requests"] for row in replicas(server)] == sent
    assert "in maintenance" in hearth(server, "doctor")
    hearth(server, "maintenance", "off")
    for future in asked:
        wait(future)


def test_the_doctor_shows_the_replicas(server: RunningServer):
    rows = {
        line.split()[1]: line
        for line in hearth(server, "doctor").splitlines()
        if "replica-" in line
    }
    for row in replicas(server):
        shown = rows[row["name"]]
        assert row["url"] in shown
        assert row["version"] in shown
        assert row["state"] in shown


def test_a_name_that_no_replica_has_is_told_with_those_there_are(server: RunningServer):
    said = hearth(server, "replicas", "pause", "replica-9", status=1)
    assert "there are: replica-0, replica-1" in said


def test_a_rank_that_the_replicas_do_not_take_is_refused_at_once(service: tinker.ServiceClient):
    with pytest.raises(tinker.BadRequestError, match="takes 64 at most"):
        new_run(service, rank=65)


def test_servers_that_run_already_are_used_and_left_running(
    server: RunningServer, tmp_path: Path, base_path: Path
):
    urls = [row["url"] for row in replicas(server)]
    options = [word for url in urls for word in ("--engine-url", url)]
    other = RunningServer(tmp_path / "data", {MODEL: base_path}, options=options)
    other.start()
    try:
        run = trained(tinker.ServiceClient(base_url=other.url, api_key=KEY), 9)
        check(run, text(1), wait(ask(sampler_of(run), 1, 20)).sequences[0])
        assert [row["url"] for row in replicas(other)] == urls
    finally:
        other.interrupt()
    assert [row["state"] for row in replicas(server)] == ["ready", "ready"]


def test_an_environment_without_vllm_ends_the_start_in_one_sentence(
    tmp_path: Path, base_path: Path
):
    settings = {"HEARTH_ENGINE_PYTHON": str(tmp_path / "python")}
    server = RunningServer(
        tmp_path / "data", {MODEL: base_path}, settings, options=("--engine", "vllm")
    )
    with pytest.raises(AssertionError, match="the server ended"):
        server.start()
    last = server.log.read_text().strip().splitlines()[-1]
    assert last.startswith("hearth: ")
    assert last.endswith("make install-vllm")
