"""Nothing acknowledged is lost: a server that is killed, and a worker that is killed, and a server
that is told to stop. The same client objects carry on, and their numbers are those of runs that
nothing happened to. Design section 1.3, issue 2 item 8.

A restart costs seconds, so one crash hits many clients at once, and each test looks at one."""

from __future__ import annotations

import os
import signal
import sqlite3
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tinker
from tinker import types

from tests.e2e.client import (
    DATA,
    MODEL,
    PROBE,
    UNTIED,
    WAIT_S,
    Raw,
    adam,
    assert_same,
    fingerprint,
    new_run,
    output_logprobs,
    prompt,
    refused,
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

PAIRS = 12
SAMPLES = 4
OTHER = [sft(text(31))]


@pytest.fixture(scope="module")
def mortal(
    tmp_path_factory: pytest.TempPathFactory, model_path: Path, untied_path: Path
) -> Iterator[RunningServer]:
    """The server of this file, without keys; its data folder outlives its processes."""
    models = {MODEL: model_path, UNTIED: untied_path}
    running = RunningServer(tmp_path_factory.mktemp("mortal") / "data", models, SETTINGS)
    running.start()
    yield running
    running.kill()


@pytest.fixture(scope="module")
def client(mortal: RunningServer) -> tinker.ServiceClient:
    return tinker.ServiceClient(base_url=mortal.url, api_key="tml-anyone")


@pytest.fixture(scope="module")
def local(mortal: RunningServer) -> Raw:
    return Raw(mortal.url, "")


@dataclass
class Before:
    """What clients held when the server was killed."""

    accumulating: tinker.TrainingClient
    queued: tinker.TrainingClient
    queued_futures: list[Any]
    finished: str
    finished_result: bytes
    snapshot: tinker.SamplingClient
    snapshot_logprobs: np.ndarray
    inflight: tinker.SamplingClient
    inflight_logprobs: np.ndarray
    samples: list[Any]
    raw_run: str
    checkpoint: str
    checkpoint_logprobs: np.ndarray


def _sample(sampler: tinker.SamplingClient, seed: int, max_tokens: int = 400) -> Any:
    params = types.SamplingParams(max_tokens=max_tokens, seed=seed, stop=[])
    return sampler.sample(prompt(PROBE), 1, params)


@pytest.fixture(scope="module")
def crashed(mortal: RunningServer, client: tinker.ServiceClient, local: Raw) -> Before:
    """Kill -9 while much is going on, and start again on the same port."""
    accumulating = new_run(client, seed=1)
    step(accumulating)
    for data in (DATA, OTHER):
        wait(accumulating.forward_backward(data, "cross_entropy"))
    snapshot = sampler_of(accumulating)
    inflight = sampler_of(accumulating, kind="inflight")
    checkpoint = wait(accumulating.save_state("before-the-crash")).path

    raw_run = local.run(seed=2)
    finished = local.forward_backward(raw_run, 1)
    finished_result = local.outcome(finished).content
    # The chunks of a batch, the first of which (seq 2) the server will not have got; and a
    # refused one behind them.
    local.forward_backward(raw_run, 3, [sft(text(3))])
    local.forward_backward(raw_run, 4, [sft(text(4))])
    bad = {"model_id": raw_run, "seq_id": 6, "adam_params": {"learning_rate": -1}}
    assert local.post("optim_step", bad).status_code == 400

    queued = new_run(client, seed=3)
    samples = [_sample(snapshot, seed) for seed in range(SAMPLES)]
    futures = [
        future
        for _ in range(PAIRS)
        for future in (queued.forward_backward(DATA, "cross_entropy"), queued.optim_step(adam()))
    ]
    before = Before(
        accumulating=accumulating,
        queued=queued,
        queued_futures=futures,
        finished=finished,
        finished_result=finished_result,
        snapshot=snapshot,
        snapshot_logprobs=sampler_fingerprint(snapshot),
        inflight=inflight,
        inflight_logprobs=sampler_fingerprint(inflight),
        samples=samples,
        raw_run=raw_run,
        checkpoint=checkpoint,
        checkpoint_logprobs=fingerprint(accumulating),
    )
    assert not all(sample.future().done() for sample in samples)
    mortal.kill()
    mortal.start()
    # Within the wait for a gap, which starts again with the server: seq 2 comes at last.
    local.http.close()
    local.http = Raw(mortal.url, "").http
    local.forward_backward(raw_run, 2, [sft(text(2))])
    local.optim_step(raw_run, 5)
    return before


def test_gradients_that_waited_for_a_step_are_still_there(
    crashed: Before, client: tinker.ServiceClient
) -> None:
    metrics = wait(crashed.accumulating.optim_step(adam())).metrics
    twin = new_run(client, seed=1)
    step(twin)
    for data in (DATA, OTHER):
        wait(twin.forward_backward(data, "cross_entropy"))
    assert metrics == pytest.approx(wait(twin.optim_step(adam())).metrics, rel=1e-5)
    assert_same(fingerprint(crashed.accumulating), fingerprint(twin), 1e-5)


def test_queued_requests_are_finished_once_each(
    crashed: Before, client: tinker.ServiceClient
) -> None:
    results = [wait(future) for future in crashed.queued_futures]
    assert [result.metrics["step"] for result in results[1::2]] == list(range(1, PAIRS + 1))
    twin = new_run(client, seed=3)
    train(twin, PAIRS)
    assert_same(fingerprint(crashed.queued), fingerprint(twin), 1e-5)
    losses = [output_logprobs(result).sum() for result in results[0::2]]
    assert losses == sorted(losses)


def test_samples_that_were_being_generated_are_finished(crashed: Before) -> None:
    """With the seed they had, so token for token."""
    sampled = [wait(sample).sequences[0].tokens for sample in crashed.samples]
    again = [_sample(crashed.snapshot, seed) for seed in range(SAMPLES)]
    assert sampled == [wait(sample).sequences[0].tokens for sample in again]
    assert all(len(tokens) == 400 for tokens in sampled)


def test_a_sampler_of_before_samples_what_it_did(crashed: Before) -> None:
    assert_same(sampler_fingerprint(crashed.snapshot), crashed.snapshot_logprobs, 1e-5)
    assert_same(sampler_fingerprint(crashed.inflight), crashed.inflight_logprobs, 1e-5)


def test_a_checkpoint_of_before_can_be_loaded(
    crashed: Before, client: tinker.ServiceClient
) -> None:
    resumed = wait(client.create_training_client_from_state(crashed.checkpoint))
    assert_same(fingerprint(resumed), crashed.checkpoint_logprobs, 1e-5)


def test_a_finished_result_can_still_be_had(crashed: Before, local: Raw) -> None:
    assert local.outcome(crashed.finished).content == crashed.finished_result


def test_a_request_sent_again_after_the_crash_is_the_same_request(
    crashed: Before, local: Raw
) -> None:
    assert local.forward_backward(crashed.raw_run, 1) == crashed.finished
    assert local.outcome(crashed.finished).content == crashed.finished_result


def test_chunks_keep_their_order_over_the_crash(crashed: Before, local: Raw) -> None:
    """Seq 3 and 4, and a refused 6, came before the crash, 2 and 5 after it."""
    twin = local.run(seed=2)
    local.forward_backward(twin, 1)
    for seq in (2, 3, 4):
        local.forward_backward(twin, seq, [sft(text(seq))])
    steps = [local.outcome(local.optim_step(run, 5)).json() for run in (crashed.raw_run, twin)]
    assert steps[0]["metrics"] == pytest.approx(steps[1]["metrics"], rel=1e-5)
    assert steps[0]["metrics"]["num_gradients"] == 4
    assert_same(local.logprobs(crashed.raw_run, 7), local.logprobs(twin, 6), 1e-5)


def test_a_run_that_is_killed_again_and_again_ends_where_it_should(
    crashed: Before, mortal: RunningServer, client: tinker.ServiceClient
) -> None:
    """The worker first, then the server, in the middle of one pipeline."""
    run = new_run(client, seed=5, rank=16)
    steps, futures = 12, []
    for _ in range(steps):
        futures += [run.forward_backward(DATA, "cross_entropy"), run.optim_step(adam())]
    for done, kill in ((2, _kill_worker), (12, _kill_server)):
        wait(futures[done])
        kill(mortal)
    results = [wait(future) for future in futures]
    assert [result.metrics["step"] for result in results[1::2]] == list(range(1, steps + 1))
    twin = new_run(client, seed=5, rank=16)
    train(twin, steps)
    assert_same(fingerprint(run), fingerprint(twin))


def _kill_server(server: RunningServer) -> None:
    server.kill()
    server.start()


def _kill_worker(server: RunningServer) -> None:
    """The one that holds MODEL; the other model's is left alone."""
    for pid in server.worker_pids():
        if str(server.models[MODEL]) in Path(f"/proc/{pid}/cmdline").read_text():
            os.kill(pid, signal.SIGKILL)
            return
    raise AssertionError("no worker")


def test_a_dead_worker_is_replaced_and_nobody_sees_an_error(
    crashed: Before, mortal: RunningServer, client: tinker.ServiceClient
) -> None:
    """One run has a gradient waiting, one has steps queued, and samples are being generated."""
    waiting, stepping = new_run(client, seed=6), new_run(client, seed=7)
    sampler = sampler_of(stepping)
    wait(waiting.forward_backward(DATA, "cross_entropy"))
    samples = [_sample(sampler, seed, 200) for seed in range(3)]
    futures = [
        future
        for _ in range(5)
        for future in (
            stepping.forward_backward(DATA, "cross_entropy"),
            stepping.optim_step(adam()),
        )
    ]
    _kill_worker(mortal)
    metrics = wait(waiting.optim_step(adam())).metrics
    for future in futures:
        wait(future)
    twins = new_run(client, seed=6), new_run(client, seed=7)
    step(twins[0])
    train(twins[1], 5)
    assert metrics["num_gradients"] == 1
    assert_same(fingerprint(waiting), fingerprint(twins[0]), 1e-5)
    assert_same(fingerprint(stepping), fingerprint(twins[1]), 1e-5)
    sampled = [wait(sample).sequences[0].tokens for sample in samples]
    again = [_sample(sampler, seed, 200) for seed in range(3)]
    assert sampled == [wait(sample).sequences[0].tokens for sample in again]


@dataclass
class Drained:
    status: int
    seconds: float
    run: tinker.TrainingClient
    other_model: tinker.TrainingClient
    sample: Any
    sampler: tinker.SamplingClient
    polled: list[int]
    silent: str


@pytest.fixture(scope="module")
def drained(
    crashed: Before, mortal: RunningServer, client: tinker.ServiceClient, local: Raw
) -> Drained:
    """Ctrl-C while a sample is long-polled; then a start with one model only, an hour and more
    after the last heartbeat."""
    run, other = new_run(client, seed=8), new_run(client, seed=8, base_model=UNTIED)
    for one in (run, other):
        step(one)
        wait(one.forward_backward(DATA, "cross_entropy"))
    sampler = sampler_of(run)
    sample = _sample(sampler, 1, 450)
    polled: list[int] = []
    poll = threading.Thread(target=_long_poll, args=(mortal, polled))
    poll.start()
    time.sleep(0.3)
    silent = local.session()
    started = time.monotonic()
    status = mortal.interrupt(30)
    seconds = time.monotonic() - started
    poll.join(WAIT_S)
    _forget_heartbeats(mortal)
    both = mortal.models
    mortal.models = {MODEL: both[MODEL]}
    mortal.start()
    mortal.models = both
    local.http = Raw(mortal.url, "").http
    return Drained(status, seconds, run, other, sample, sampler, polled, silent)


def _long_poll(server: RunningServer, polled: list[int]) -> None:
    """Of a sample that takes long, without an SDK."""
    raw = Raw(server.url, "")
    body = {"session_id": raw.session(), "sampling_session_seq_id": 0, "base_model": MODEL}
    sampler = raw.post("create_sampling_session", body).json()["sampling_session_id"]
    body = {
        "sampling_session_id": sampler,
        "seq_id": 0,
        "num_samples": 8,
        "prompt": {"chunks": [{"type": "encoded_text", "tokens": PROBE}]},
        "sampling_params": {"stop": []},
    }
    request = raw.promise("asample", body)
    answer = raw.post("retrieve_future", {"request_id": request})
    polled.append(answer.status_code)


def _forget_heartbeats(server: RunningServer) -> None:
    with sqlite3.connect(server.data / "hearth.db") as db:
        db.execute("UPDATE sessions SET last_heartbeat_at = last_heartbeat_at - 100000")
    db.close()


def _session_status(server: RunningServer, session: str) -> str:
    db = sqlite3.connect(server.data / "hearth.db")
    found = db.execute("SELECT status FROM sessions WHERE id = ?", (session,)).fetchone()
    db.close()
    return found[0]


def test_ctrl_c_ends_the_server_within_seconds_although_clients_wait(drained: Drained) -> None:
    assert drained.status == 0
    assert drained.seconds < 10
    assert drained.polled == [408]


def test_a_session_that_fell_silent_ends_and_comes_back_with_its_client(
    drained: Drained, mortal: RunningServer, client: tinker.ServiceClient
) -> None:
    """public-reports D48: a dead client's session ends; one that was only away carries on."""
    assert _session_status(mortal, drained.silent) == "expired"
    metrics = wait(drained.run.optim_step(adam())).metrics
    assert _session_status(mortal, drained.run.model_id.split(":")[0]) == "active"
    twin = new_run(client, seed=8)
    step(twin)
    wait(twin.forward_backward(DATA, "cross_entropy"))
    assert metrics == pytest.approx(wait(twin.optim_step(adam())).metrics, rel=1e-5)
    assert_same(fingerprint(drained.run), fingerprint(twin), 1e-5)


def test_a_sample_that_the_stop_interrupted_is_finished_after_the_start(
    drained: Drained,
) -> None:
    sampled = wait(drained.sample).sequences[0].tokens
    assert sampled == wait(_sample(drained.sampler, 1, 450)).sequences[0].tokens


def test_a_run_whose_model_is_not_served_any_more_is_refused_in_words(
    drained: Drained, client: tinker.ServiceClient
) -> None:
    started = time.monotonic()
    for send in (
        lambda: drained.other_model.optim_step(adam()),
        lambda: drained.other_model.forward(DATA, "cross_entropy"),
        lambda: drained.other_model.save_state("nowhere"),
    ):
        with refused(UNTIED, "not served"):
            wait(send())
    assert time.monotonic() - started < 5


def test_a_run_whose_model_is_served_again_carries_on(
    drained: Drained, mortal: RunningServer, client: tinker.ServiceClient
) -> None:
    mortal.kill()
    mortal.start()
    metrics = wait(drained.other_model.optim_step(adam())).metrics
    assert metrics["num_gradients"] == 1
    twin = new_run(client, seed=8, base_model=UNTIED)
    step(twin)
    step(twin)
    assert_same(fingerprint(drained.other_model), fingerprint(twin), 1e-5)


def test_ctrl_c_twice_still_ends_it(mortal: RunningServer, drained: Drained) -> None:
    os.kill(mortal.pid, signal.SIGINT)
    mortal.interrupt(30)
