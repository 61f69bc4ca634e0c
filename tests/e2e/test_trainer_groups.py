"""A base model with two trainer groups, each a worker of its own: what clients get is what one
group gives them, wherever their runs are, move, or lose their worker."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import tinker

from server.live import LiveServer
from tests.e2e.client import (
    DATA,
    MODEL,
    WAIT_S,
    adam,
    assert_same,
    fingerprint,
    generate,
    new_run,
    sampler_of,
    sft,
    step,
    text,
    wait,
)
from tests.e2e.conftest import SETTINGS
from tests.running_server import RunningServer

STEPS = 12


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory, model_path: Path) -> Iterator[RunningServer]:
    """The server of this file, without keys."""
    data = tmp_path_factory.mktemp("pair") / "data"
    options = ["--trainer-groups", "2"]
    running = RunningServer(data, {MODEL: model_path}, SETTINGS, options=options)
    running.start()
    yield running
    running.kill()


@pytest.fixture
def client(pair: RunningServer) -> tinker.ServiceClient:
    return tinker.ServiceClient(base_url=pair.url, api_key="tml-anyone")


@dataclass
class Tenant:
    """A run and its pipeline: every step has a batch of its own."""

    run: tinker.TrainingClient
    seed: int
    futures: list[Any] = field(default_factory=list)

    @classmethod
    def start(cls, service: tinker.ServiceClient, seed: int) -> Tenant:
        return cls(new_run(service, seed=seed, rank=4 + 4 * (seed % 3)), seed)

    @property
    def id(self) -> str:
        return self.run.model_id

    def send(self) -> None:
        for number in range(STEPS):
            batch = [sft(text(100 * self.seed + number, 12 + number)), *DATA]
            self.futures.append(self.run.forward_backward(batch, "cross_entropy"))
            self.futures.append(self.run.optim_step(adam()))

    def losses(self) -> list[float]:
        """Of each step; none of them was done twice or left out."""
        results = [wait(future) for future in self.futures]
        assert [one.metrics["step"] for one in results[1::2]] == list(range(1, STEPS + 1))
        return [one.metrics["loss:sum"] for one in results[::2]]


def tenants(service: tinker.ServiceClient) -> list[Tenant]:
    return [Tenant.start(service, seed) for seed in range(1, 5)]


@pytest.fixture(scope="module")
def alone(service: tinker.ServiceClient) -> list[tuple[list[float], Any]]:
    """The losses, and the weights in the end, of the same tenants on a server with one group."""
    ones = tenants(service)
    for one in ones:
        one.send()
    return [(one.losses(), fingerprint(one.run)) for one in ones]


def check(ones: list[Tenant], alone: list[tuple[list[float], Any]]) -> None:
    for one, (losses, weights) in zip(ones, alone, strict=True):
        assert one.losses() == pytest.approx(losses, rel=1e-5)
        assert_same(fingerprint(one.run), weights, 1e-5)


def trainers(server: RunningServer) -> dict[str, dict[str, Any]]:
    live = LiveServer.find(server.data)
    assert live is not None
    return {row["name"]: row for row in live.get("trainers")}


def home(server: RunningServer, run: str) -> str | None:
    return next((name for name, row in trainers(server).items() if run in row["runs"]), None)


def until(true: Callable[[], bool]) -> None:
    ends = time.monotonic() + WAIT_S
    while not true():
        assert time.monotonic() < ends
        time.sleep(0.02)


def hearth(server: RunningServer, *words: str) -> str:
    command = [sys.executable, "-m", "server.cli", *words, "--data", str(server.data)]
    environment = {**os.environ, "COLUMNS": "200"}
    return subprocess.run(
        command, capture_output=True, text=True, check=True, env=environment
    ).stdout


def kill_worker(server: RunningServer, number: int) -> None:
    """Of the trainer group with this number: each writes to a log of its own."""
    log = f"worker-tiny--llama{f'-{number}' if number else ''}.log"
    [pid] = [pid for pid in server.worker_pids() if os.readlink(f"/proc/{pid}/fd/1").endswith(log)]
    os.kill(pid, signal.SIGKILL)


def test_losses_are_those_of_one_group(
    pair: RunningServer, client: tinker.ServiceClient, alone: list[tuple[list[float], Any]]
) -> None:
    assert len(pair.worker_pids()) == 2
    ones = tenants(client)
    for one in ones:
        one.send()
    check(ones, alone)
    assert sorted(home(pair, one.id) or "" for one in ones) == 2 * ["trainer-0"] + 2 * ["trainer-1"]


def test_moving_in_the_middle_of_training_changes_nothing(
    pair: RunningServer, client: tinker.ServiceClient, alone: list[tuple[list[float], Any]]
) -> None:
    ones = tenants(client)
    for one in ones:
        one.send()
    for done, one in zip((3, 6, 9), ones, strict=False):
        before = home(pair, one.id)
        wait(one.futures[done])
        assert f"{one.id} goes to trainer-" in hearth(pair, "trainers", "move", one.id)
        until(lambda one=one, before=before: home(pair, one.id) not in {before, None})
    check(ones, alone)
    assert "trainer-1" in hearth(pair, "doctor")


@pytest.mark.parametrize("number", [1, 0])
def test_a_killed_worker_costs_nobody_anything_and_its_runs_go_on_with_the_other(
    pair: RunningServer,
    client: tinker.ServiceClient,
    alone: list[tuple[list[float], Any]],
    number: int,
) -> None:
    ones = tenants(client)
    step(held := new_run(client, seed=9))
    sampler = sampler_of(held)
    dying, other = f"trainer-{number}", f"trainer-{1 - number}"
    before = trainers(pair)
    for one in ones:
        one.send()
    wait(ones[0].futures[4])
    on_it = [one.id for one in ones if home(pair, one.id) == dying]
    kill_worker(pair, number)
    sample = generate(sampler, text(1), 40, seed=3, stop=[])
    check(ones, alone)
    after = trainers(pair)
    assert on_it
    assert after[other]["arrivals"] - before[other]["arrivals"] >= len(on_it)
    until(lambda: trainers(pair)[dying]["generation"] == before[dying]["generation"] + 1)
    assert trainers(pair)[dying]["state"] == "ready"
    assert generate(sampler, text(1), 40, seed=3, stop=[]).tokens == sample.tokens


def test_a_drained_group_is_empty_and_nobody_waits(
    pair: RunningServer, client: tinker.ServiceClient, alone: list[tuple[list[float], Any]]
) -> None:
    ones = tenants(client)
    for one in ones:
        one.send()
    hearth(pair, "trainers", "drain", "trainer-0")
    check(ones, alone)
    until(lambda: trainers(pair)["trainer-0"]["state"] == "drained")
    assert {home(pair, one.id) for one in ones} == {"trainer-1"}
    assert "drained" in hearth(pair, "trainers", "list")
    hearth(pair, "trainers", "resume", "trainer-0")
    until(lambda: trainers(pair)["trainer-0"]["state"] == "ready")
