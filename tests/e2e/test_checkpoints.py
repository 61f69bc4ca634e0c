"""Checkpoints: what is in one, how long it stays, and how exactly training goes on from it."""

from __future__ import annotations

import concurrent.futures
import sqlite3
import urllib.error
import urllib.parse
import urllib.request
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tinker
import torch
from transformers import AutoModelForCausalLM

from tests.e2e.client import (
    DATA,
    MODEL,
    PROBE,
    UNTIED,
    Raw,
    adam,
    adapter_of,
    assert_same,
    download,
    fingerprint,
    fresh,
    new_run,
    refused,
    same,
    sampler_fingerprint,
    sampler_of,
    sft,
    step,
    text,
    train,
    wait,
)
from tests.running_server import RunningServer
from tests.unit.backends.oracle import logprobs, peft_model

ALL_FLAGS = [
    {"train_attn": attn, "train_mlp": mlp, "train_unembed": unembed}
    for attn in (True, False)
    for mlp in (True, False)
    for unembed in (True, False)
    if attn or mlp or unembed
]


def _flag_name(flags: dict[str, bool]) -> str:
    return "+".join(name.removeprefix("train_") for name, on in flags.items() if on)


# ---------------------------------------------------------------- resume


def test_resuming_with_the_optimizer_is_going_on_and_without_it_is_not(
    service: tinker.ServiceClient,
) -> None:
    """from-users 1, public-reports C32: 1 = 2 ≠ 3"""
    run = new_run(service, seed=51)
    train(run, 5)
    path = wait(run.save_state(fresh())).path
    with_moments = wait(service.create_training_client_from_state_with_optimizer(path))
    weights_only = wait(service.create_training_client_from_state(path))
    losses = [step(one, [sft(text(1))]).metrics["loss:sum"] for one in (run, with_moments)]
    step(weights_only, [sft(text(1))])
    assert losses[0] == pytest.approx(losses[1], rel=1e-6)
    assert_same(fingerprint(with_moments), fingerprint(run), 1e-5)
    assert not same(fingerprint(weights_only), fingerprint(run), 1e-3)


def test_resuming_without_the_optimizer_starts_adam_at_zero(
    service: tinker.ServiceClient,
) -> None:
    """from-users 1: Adam's first step moves each weight by the learning rate, whatever came
    before; so a run resumed twice takes the same first step."""
    run = new_run(service, seed=52)
    train(run, 3)
    path = wait(run.save_state(fresh())).path
    steps = []
    for _ in range(2):
        resumed = wait(service.create_training_client_from_state(path))
        wait(resumed.forward_backward(DATA, "cross_entropy"))
        metrics = wait(resumed.optim_step(adam())).metrics
        assert metrics["step"] == 1
        steps.append(fingerprint(resumed))
    assert_same(steps[0], steps[1], 1e-6)


@pytest.mark.parametrize("flags", ALL_FLAGS, ids=_flag_name)
def test_a_resumed_run_has_the_rank_and_the_flags_it_was_saved_with(
    service: tinker.ServiceClient, rest: tinker.RestClient, flags: dict[str, bool]
) -> None:
    """from-users 9"""
    run = new_run(service, rank=4, seed=53, **flags)
    train(run, 2)
    path = wait(run.save_state(fresh())).path
    info = wait(rest.get_weights_info_by_tinker_path(path))
    assert (info.lora_rank, info.base_model, info.is_lora) == (4, MODEL, True)
    assert {name: getattr(info, name) for name in flags} == flags
    resumed = wait(service.create_training_client_from_state_with_optimizer(path))
    assert resumed.get_info().lora_rank == 4
    assert_same(fingerprint(resumed), fingerprint(run), 1e-6)
    step(run)
    step(resumed)
    assert_same(fingerprint(resumed), fingerprint(run), 1e-5)


def test_a_run_can_be_resumed_by_another_client_of_the_same_key(
    service: tinker.ServiceClient, server: RunningServer
) -> None:
    """from-users 9"""
    run = new_run(service, rank=4, train_unembed=False)
    train(run, 2)
    path = wait(run.save_state(fresh())).path
    other = tinker.ServiceClient(base_url=server.url, api_key=server.keys["alice"])
    resumed = wait(other.create_training_client_from_state(path))
    assert_same(fingerprint(resumed), fingerprint(run), 1e-6)


def test_a_load_drops_the_gradient_that_waited(service: tinker.ServiceClient) -> None:
    """issue 2 item 11"""
    run = new_run(service, seed=54)
    train(run, 2)
    path = wait(run.save_state(fresh())).path
    wait(run.forward_backward([sft(text(1))], "cross_entropy"))
    wait(run.load_state_with_optimizer(path))
    wait(run.forward_backward(DATA, "cross_entropy"))
    assert wait(run.optim_step(adam())).metrics["num_gradients"] == 1
    twin = wait(service.create_training_client_from_state_with_optimizer(path))
    step(twin)
    assert_same(fingerprint(run), fingerprint(twin), 1e-5)


def test_a_save_keeps_the_gradient_that_waits(service: tinker.ServiceClient) -> None:
    saving, quiet = new_run(service, seed=55), new_run(service, seed=55)
    for run in (saving, quiet):
        wait(run.forward_backward(DATA, "cross_entropy"))
    wait(saving.save_state(fresh()))
    sampler_of(saving)
    for run in (saving, quiet):
        wait(run.optim_step(adam()))
    assert_same(fingerprint(saving), fingerprint(quiet), 1e-6)


def test_training_from_a_checkpoint_leaves_its_run_alone(service: tinker.ServiceClient) -> None:
    """public-reports D51"""
    first = new_run(service, seed=56)
    train(first, 3)
    before = fingerprint(first)
    second = wait(
        service.create_training_client_from_state_with_optimizer(
            wait(first.save_state(fresh())).path
        )
    )
    step(second)
    assert_same(fingerprint(first), before, 1e-6)
    assert not same(fingerprint(second), before)
    step(first)
    assert_same(fingerprint(first), fingerprint(second), 1e-5)


# ---------------------------------------------------------------- names


def test_a_training_and_a_sampler_checkpoint_of_one_name_are_two(
    service: tinker.ServiceClient, rest: tinker.RestClient
) -> None:
    """public-reports C37, issue 2 item 11"""
    run = new_run(service, seed=57)
    train(run, 1)
    saved, state = fingerprint(run), wait(run.save_state("same")).path
    train(run, 3)
    weights = wait(run.save_weights_for_sampler("same")).path
    wait(run.save_weights_external("same"))
    assert_same(fingerprint(wait(service.create_training_client_from_state(state))), saved, 1e-6)
    sampler = wait(service.create_sampling_client(model_path=weights))
    assert_same(sampler_fingerprint(sampler), fingerprint(run))
    listed = wait(rest.list_checkpoints(run.model_id)).checkpoints
    assert sorted(one.checkpoint_id for one in listed) == [
        "external_weights/same",
        "sampler_weights/same",
        "weights/same",
    ]
    wait(rest.delete_checkpoint_from_tinker_path(state))
    assert len(wait(rest.list_checkpoints(run.model_id)).checkpoints) == 2


def test_overwrite_replaces_weights_and_metadata(
    service: tinker.ServiceClient, rest: tinker.RestClient
) -> None:
    run = new_run(service, seed=58)
    train(run, 1)
    path = wait(run.save_state("again", user_metadata={"epoch": "1"})).path
    train(run, 3)
    assert wait(run.save_state("again", overwrite=True)).path == path
    resumed = wait(service.create_training_client_from_state(path))
    assert_same(fingerprint(resumed), fingerprint(run), 1e-6)
    [listed] = wait(rest.list_checkpoints(run.model_id)).checkpoints
    assert not listed.user_metadata


def test_a_refused_clash_leaves_what_stood_there(service: tinker.ServiceClient) -> None:
    """from-users 13"""
    run = new_run(service, seed=59)
    train(run, 1)
    saved, path = fingerprint(run), wait(run.save_state("stands")).path
    train(run, 3)
    with refused("exists already"):
        wait(run.save_state("stands"))
    resumed = wait(service.create_training_client_from_state(path))
    assert_same(fingerprint(resumed), saved, 1e-6)


# ---------------------------------------------------------------- lifetime


@pytest.mark.parametrize("seconds", [3600, 10 * 365 * 24 * 3600])
def test_the_shortest_and_the_longest_lifetime_are_accepted(
    service: tinker.ServiceClient, rest: tinker.RestClient, seconds: int
) -> None:
    """from-users 4"""
    run = new_run(service)
    wait(run.save_state("kept", ttl_seconds=seconds))
    [listed] = wait(rest.list_checkpoints(run.model_id)).checkpoints
    assert (listed.expires_at - listed.time).total_seconds() == pytest.approx(seconds, abs=1)


def test_a_lifetime_is_changed_and_removed_without_loading(
    service: tinker.ServiceClient, rest: tinker.RestClient
) -> None:
    """from-users 4"""
    run = new_run(service)
    path = wait(run.save_state("kept", ttl_seconds=3600)).path
    wait(rest.set_checkpoint_ttl_from_tinker_path(path, 7200))
    [listed] = wait(rest.list_checkpoints(run.model_id)).checkpoints
    assert (listed.expires_at - listed.time).total_seconds() >= 7199
    wait(rest.set_checkpoint_ttl_from_tinker_path(path, None))
    [listed] = wait(rest.list_checkpoints(run.model_id)).checkpoints
    assert listed.expires_at is None
    for seconds in (3599, 10 * 365 * 24 * 3600 + 1):
        with refused("ttl_seconds"):
            wait(rest.set_checkpoint_ttl_from_tinker_path(path, seconds))


def test_an_expired_checkpoint_is_gone(
    service: tinker.ServiceClient, rest: tinker.RestClient, server: RunningServer
) -> None:
    """from-users 4: carried out. (The test turns its clock, in the database.)"""
    run = new_run(service)
    path = wait(run.save_state("short", ttl_seconds=3600)).path
    weights = wait(run.save_weights_for_sampler("short", ttl_seconds=3600)).path
    db = sqlite3.connect(server.data / "hearth.db", timeout=20)
    with db:
        db.execute("UPDATE checkpoints SET expires_at = 1 WHERE run_id = ?", (run.model_id,))
    db.close()
    assert not wait(rest.list_checkpoints(run.model_id)).checkpoints
    with refused("does not exist"):
        wait(service.create_training_client_from_state(path))
    with refused("does not exist"):
        wait(service.create_sampling_client(model_path=weights))
    assert wait(run.save_state("short")).path == path


# ---------------------------------------------------------------- files


@pytest.mark.parametrize("model", [MODEL, UNTIED])
@pytest.mark.parametrize("flags", ALL_FLAGS, ids=_flag_name)
def test_a_downloaded_adapter_gives_peft_the_logprobs_of_the_sampler(
    service: tinker.ServiceClient,
    rest: tinker.RestClient,
    model_path: Path,
    untied_path: Path,
    tmp_path: Path,
    model: str,
    flags: dict[str, bool],
) -> None:
    """from-users 10, public-reports C43, B25: tied and untied, each set of flags; the base is
    loaded fresh, so an embedding that had been changed with the head would show."""
    run = new_run(service, base_model=model, rank=4, seed=61, **flags)
    train(run, 3)
    saved = wait(run.save_weights_external(fresh("peft")))
    folder = download(rest, saved.path, tmp_path / "adapter")
    peft = peft_model(model_path if model == MODEL else untied_path, folder)
    tokens, targets = torch.tensor(PROBE[:-1]), torch.tensor(PROBE[1:])
    with torch.no_grad():
        expected = logprobs(peft, tokens, targets).numpy()
    assert_same(sampler_fingerprint(sampler_of(run)), expected)
    assert_same(fingerprint(run), expected)


def test_an_adapter_changes_what_its_flags_name_and_nothing_else(
    service: tinker.ServiceClient, rest: tinker.RestClient, tmp_path: Path
) -> None:
    """public-reports B23: one step with one flag alone; every layer's tensors, each moved."""
    parts = {
        "attn": {"q_proj", "k_proj", "v_proj", "o_proj"},
        "mlp": {"gate_proj", "up_proj", "down_proj"},
        "unembed": {"lm_head"},
    }
    for part, modules in parts.items():
        flags = {f"train_{name}": name == part for name in parts}
        run = new_run(service, seed=62, **flags)
        before = adapter_of(run, rest, tmp_path / f"{part}-before")
        step(run)
        step(run)
        after = adapter_of(run, rest, tmp_path / f"{part}-after")
        assert {name.split(".")[-3] for name in after} == modules
        layers = 1 if part == "unembed" else 2
        assert len(after) == 2 * layers * len(modules)
        for name, tensor in after.items():
            assert not torch.equal(tensor, before[name]), name


def test_a_merged_adapter_gives_the_logits_of_the_sampler(
    service: tinker.ServiceClient, rest: tinker.RestClient, model_path: Path, tmp_path: Path
) -> None:
    """from-users 10: merged by hand, W + alpha / rank * B A, on a model with tied embeddings:
    the head moves and the input embedding does not."""
    run = new_run(service, rank=4, seed=63)
    train(run, 3)
    adapter = adapter_of(run, rest, tmp_path / "adapter")
    model = AutoModelForCausalLM.from_pretrained(model_path, dtype=torch.float64)
    model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.detach().clone())
    with torch.no_grad():
        for name, a in adapter.items():
            if ".lora_A." not in name:
                continue
            module = name.removeprefix("base_model.model.").split(".lora_A.")[0]
            b = adapter[name.replace(".lora_A.", ".lora_B.")]
            # alpha is the rank: the scale is 1.
            model.get_submodule(module).weight += b.double() @ a.double()
        tokens, targets = torch.tensor(PROBE[:-1]), torch.tensor(PROBE[1:])
        expected = logprobs(model, tokens, targets).numpy()
    assert_same(sampler_fingerprint(sampler_of(run)), expected)


def test_a_download_needs_no_key_but_a_whole_and_fresh_signature(
    service: tinker.ServiceClient, rest: tinker.RestClient
) -> None:
    run = new_run(service)
    answer = wait(rest.get_external_weights_urls(wait(run.save_weights_external(fresh())).path))
    assert answer.expires.tzinfo is not None
    assert {"adapter_config.json", "adapter_model.safetensors"} <= set(answer.urls)
    assert all("/" not in name and not name.startswith(".") for name in answer.urls)
    url = answer.urls["adapter_model.safetensors"]
    assert _status(url) == 200
    parts = urllib.parse.urlsplit(url)
    query = dict(urllib.parse.parse_qsl(parts.query))
    tampered = {
        "signature": query["signature"][:-1] + ("0" if query["signature"][-1] != "0" else "1"),
        "expires": str(int(query["expires"]) + 1),
    }
    for name, value in tampered.items():
        changed = parts._replace(query=urllib.parse.urlencode({**query, name: value}))
        assert _status(changed.geturl()) == 404
    other = answer.urls["adapter_config.json"].split("?")[0]
    assert _status(f"{other}?{parts.query}") == 404
    assert _status(url.split("?")[0]) == 400


def _status(url: str) -> int:
    try:
        with urllib.request.urlopen(url, timeout=10) as answer:
            return answer.status
    except urllib.error.HTTPError as error:
        return error.code


def test_a_download_of_a_deleted_checkpoint_ends(
    service: tinker.ServiceClient, rest: tinker.RestClient, raw: Raw
) -> None:
    run = new_run(service)
    path = wait(run.save_weights_external(fresh())).path
    url = wait(rest.get_external_weights_urls(path)).urls["adapter_config.json"]
    run_id, kind, name = path.removeprefix("tinker://").split("/")
    archive = raw.get(f"training_runs/{run_id}/checkpoints/{kind}/{name}/archive")
    links = [url, archive.headers["location"]]
    assert [_status(link) for link in links] == [200, 200]
    wait(rest.delete_checkpoint_from_tinker_path(path))
    assert [_status(link) for link in links] == [404, 404]
    with refused("does not exist"):
        wait(rest.get_external_weights_urls(path))


# ---------------------------------------------------------------- seeds


def test_a_seed_repeats_the_adapter_exactly(
    service: tinker.ServiceClient, rest: tinker.RestClient, tmp_path: Path
) -> None:
    """issue 2 item 11, public-reports B23, D46"""
    adapters = [
        adapter_of(new_run(service, seed=seed), rest, tmp_path / str(number))
        for number, seed in enumerate((7, 7, 8, None, None))
    ]
    first, again, other, *unseeded = adapters
    assert all(torch.equal(first[name], again[name]) for name in first)
    for different in (other, *unseeded):
        assert not any(torch.equal(first[n], different[n]) for n in first if ".lora_A." in n)
    assert not torch.equal(*[next(iter(adapter.values())) for adapter in unseeded])


def test_a_fresh_adapter_is_the_base_model(service: tinker.ServiceClient, model_path: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(model_path, dtype=torch.float64)
    with torch.no_grad():
        expected = logprobs(model, torch.tensor(PROBE[:-1]), torch.tensor(PROBE[1:])).numpy()
    assert_same(fingerprint(new_run(service, rank=32)), expected)
    assert_same(
        sampler_fingerprint(wait(service.create_sampling_client(base_model=MODEL))), expected
    )


def test_equal_seeds_take_equal_steps(service: tinker.ServiceClient) -> None:
    runs = [new_run(service, seed=seed) for seed in (7, 7, 8)]
    for run in runs:
        step(run)
        step(run)
    prints = [fingerprint(run) for run in runs]
    assert_same(prints[0], prints[1], 1e-6)
    assert not same(prints[0], prints[2])


def test_two_clients_that_start_in_the_same_second_both_work(server: RunningServer) -> None:
    """from-users 14"""

    def start(seed: int) -> np.ndarray:
        client = tinker.ServiceClient(base_url=server.url, api_key=server.keys["alice"])
        run = new_run(client, seed=seed)
        step(run)
        return fingerprint(run)

    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        prints: list[Any] = list(pool.map(start, [1, 2, 1, 2]))
    assert_same(prints[0], prints[2], 1e-5)
    assert_same(prints[1], prints[3], 1e-5)
