"""`hearth serve --engine vllm`: the real SDK, a real server process, real vLLM replicas."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx2
import pytest
import tinker

from tests.e2e.client import (
    MODEL,
    WAIT_S,
    adam,
    generate,
    new_run,
    sampler_of,
    sft,
    text,
    train,
    wait,
)
from tests.running_server import RunningServer
from tests.vllm.served import (
    KEY,
    LONG,
    Flow,
    ask,
    check,
    hearth,
    kill_replica,
    on_base,
    replicas,
    trained,
    until,
)


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
    with ThreadPoolExecutor(1) as pool:
        completion = pool.submit(complete, server, text(1), 5)
        time.sleep(1)
        assert not any(future.future().done() for future in asked)
        assert not completion.done()
        assert [row["requests"] for row in replicas(server)] == sent
        assert "in maintenance" in hearth(server, "doctor")
        hearth(server, "maintenance", "off")
        for future in asked:
            wait(future)
        assert completion.result()["usage"]["completion_tokens"] == 5


def complete(server: RunningServer, tokens: list[int], max_tokens: int) -> dict[str, Any]:
    """What OpenAI's route answers."""
    body = {"model": MODEL, "prompt": tokens, "max_tokens": max_tokens, "seed": 1}
    with httpx2.Client(timeout=WAIT_S, trust_env=False) as http:
        answer = http.post(f"{server.url}/oai/api/v1/completions", json=body)
    assert answer.status_code == 200, answer.text
    return answer.json()


def test_a_sample_ends_with_the_token_that_completes_a_stop_string(
    service: tinker.ServiceClient,
):
    """Token i is byte i, so the bytes of the free run are its text."""
    sampler = sampler_of(trained(service, 10))
    free = generate(sampler, text(1), 40, seed=2, stop=[])
    said = bytes(free.tokens).decode("latin-1")
    spelled = [i for i in range(38) if said[i : i + 2].isascii()]
    assert spelled
    for start in spelled[:3]:
        stop = said[start : start + 2]
        cut = generate(sampler, text(1), 40, seed=2, stop=["absent", stop])
        assert cut.stop_reason == "stop"
        assert cut.tokens == free.tokens[: said.index(stop) + 2]


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
        with tinker.ServiceClient(base_url=other.url, api_key=KEY) as service:
            run = trained(service, 9)
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
