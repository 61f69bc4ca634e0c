"""A base model that several ranks divide among them, and a worker beside them that samples: for
clients the same as one process, and when a rank dies nobody sees an error."""

from __future__ import annotations

import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import tinker
from tinker import types

from server.live import LiveServer
from tests.e2e.client import (
    DATA,
    MODEL,
    PROBE,
    adam,
    assert_same,
    fingerprint,
    fresh,
    new_run,
    output_logprobs,
    prompt,
    sampler_fingerprint,
    sampler_of,
    sft,
    step,
    text,
    train,
    wait,
)
from tests.e2e.conftest import SETTINGS
from tests.running_server import RunningServer

FSDP = ("--trainer", "fsdp", "--world-size", "2")
MEGATRON = (
    *("--trainer", "megatron", "--world-size", "4"),
    *("--tensor-parallel", "2", "--pipeline-parallel", "2"),
)
MIXED = [sft(text(seed, length)) for seed, length in ((1, 40), (2, 7), (3, 25))]


@pytest.fixture(
    scope="module",
    params=[
        pytest.param(FSDP, id="fsdp"),
        pytest.param(MEGATRON, id="megatron", marks=pytest.mark.megatron),
    ],
)
def divided(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, model_path: Path
) -> Iterator[RunningServer]:
    """A server without keys."""
    data = tmp_path_factory.mktemp("divided") / "data"
    running = RunningServer(data, {MODEL: model_path}, SETTINGS, threads=2, options=request.param)
    running.start()
    yield running
    running.kill()


@pytest.fixture(scope="module")
def client(divided: RunningServer) -> tinker.ServiceClient:
    return tinker.ServiceClient(base_url=divided.url, api_key="tml-anyone")


def _ranks(server: RunningServer) -> list[psutil.Process]:
    return [
        process
        for process in psutil.Process(server.pid).children(recursive=True)
        if "backends.workers.rank" in process.cmdline()
    ]


def _operator(server: RunningServer, path: str) -> Any:
    live = LiveServer.find(server.data)
    assert live is not None
    return live.get(path)


def test_it_trains_and_samples_as_one_process_does(
    client: tinker.ServiceClient, service: tinker.ServiceClient
) -> None:
    """Runs of different ranks at the same time, here and on a server with a local trainer."""
    results = []
    for at in (client, service):
        runs = [new_run(at, seed=rank, rank=rank) for rank in (4, 16)]
        for _ in range(3):
            passed = [run.forward_backward(MIXED, "cross_entropy") for run in runs]
            stepped = [run.optim_step(adam()) for run in runs]
            outputs = [wait(future) for future in passed]
            norms = [wait(future).metrics["grad_norm"] for future in stepped]
        sampler = sampler_of(runs[1])
        results.append(
            (
                [output_logprobs(output, i) for output in outputs for i in range(3)],
                norms,
                [fingerprint(run) for run in runs],
                sampler_fingerprint(sampler),
            )
        )
    (logprobs, norms, prints, sampled), (theirs, their_norms, their_prints, their_sampled) = results
    for ours, their in zip(
        [*logprobs, *prints, sampled], [*theirs, *their_prints, their_sampled], strict=True
    ):
        assert_same(ours, their, 1e-4)
    assert norms == pytest.approx(their_norms, rel=1e-4)


def test_checkpoints_are_those_of_any_trainer(client: tinker.ServiceClient) -> None:
    run = new_run(client, seed=3)
    train(run, 2)
    saved = wait(run.save_state(fresh())).path
    resumed = wait(client.create_training_client_from_state_with_optimizer(saved))
    for one in (run, resumed):
        train(one, 2)
    assert_same(fingerprint(run), fingerprint(resumed), 1e-5)


def test_a_rank_that_is_killed_is_seen_by_nobody(
    divided: RunningServer, client: tinker.ServiceClient
) -> None:
    """One run has a gradient waiting, one has steps queued, and samples go on meanwhile."""
    waiting, stepping = new_run(client, seed=6), new_run(client, seed=7)
    sampler = sampler_of(stepping)
    wait(waiting.forward_backward(DATA, "cross_entropy"))
    futures = [
        future
        for _ in range(8)
        for future in (
            stepping.forward_backward(MIXED, "cross_entropy"),
            stepping.optim_step(adam()),
        )
    ]
    wait(futures[2])
    before = _ranks(divided)
    assert len(before) == int(divided.options[3])
    before[1].kill()
    params = types.SamplingParams(max_tokens=20, seed=1, stop=[])
    sampled = wait(sampler.sample(prompt(PROBE), 1, params)).sequences[0].tokens
    assert len(sampled) == 20
    metrics = wait(waiting.optim_step(adam())).metrics
    results = [wait(future) for future in futures]
    assert [result.metrics["step"] for result in results[1::2]] == list(range(1, 9))
    twins = new_run(client, seed=6), new_run(client, seed=7)
    step(twins[0])
    train(twins[1], 8, MIXED)
    assert metrics["num_gradients"] == 1
    assert_same(fingerprint(waiting), fingerprint(twins[0]), 1e-4)
    assert_same(fingerprint(stepping), fingerprint(twins[1]), 1e-4)
    _, left = psutil.wait_procs(before, timeout=10)
    assert not left
    assert len(_ranks(divided)) == len(before)


def test_the_operator_sees_the_workers(divided: RunningServer) -> None:
    """After the death above."""
    [trainer] = _operator(divided, "trainers")
    assert (trainer["model"], trainer["state"]) == (MODEL, "ready")
    assert trainer["generation"] >= 1
    assert _operator(divided, "samplers") == [{"model": MODEL, "alive": True, "generation": 1}]
    live = LiveServer.find(divided.data)
    assert live is not None
    request = urllib.request.Request(
        f"{divided.url}/operator/metrics", headers={"authorization": f"Bearer {live.token}"}
    )
    text = urllib.request.urlopen(request, timeout=10).read().decode()
    restarts = trainer["generation"] - 1
    of = f'{{model="{MODEL}",trainer="trainer-0"}}'
    assert f"hearth_trainer_restarts_total{of} {restarts}.0" in text
    assert f'hearth_sampler_up{{model="{MODEL}"}} 1.0' in text


def test_what_the_ranks_say_is_in_the_workers_log(divided: RunningServer) -> None:
    log = (divided.data / "logs" / f"worker-{MODEL.replace('/', '--')}.log").read_text()
    for rank in range(int(divided.options[3])):
        assert any(line.startswith(f"rank {rank}: ") for line in log.splitlines())


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ("--world-size 2", "hearth: trainer_world_size is 2, but trainer local is one"),
        (
            "--trainer fsdp --world-size 2 --ray 127.0.0.1:1",
            r"hearth: .*no Ray cluster answers at 127.0.0.1:1: .* refused",
        ),
        pytest.param(
            "--trainer megatron --world-size 4 --tensor-parallel 4",
            "hearth: llama: num_key_value_heads = 2 cannot be divided among 4 ranks",
            marks=pytest.mark.megatron,
        ),
    ],
)
def test_a_world_that_cannot_be_is_refused_in_one_sentence(
    tmp_path: Path, model_path: Path, options: str, why: str
) -> None:
    server = RunningServer(tmp_path / "data", {MODEL: model_path}, options=options.split())
    with pytest.raises(AssertionError, match=why):
        server.start()


def test_ctrl_c_ends_them_all(divided: RunningServer, client: tinker.ServiceClient) -> None:
    """The last test here."""
    train(new_run(client, seed=9), 1)
    everyone = psutil.Process(divided.pid).children(recursive=True)
    assert divided.interrupt() == 0
    _, left = psutil.wait_procs(everyone, timeout=10)
    assert not left
