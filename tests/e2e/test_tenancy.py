"""Two tenants on one server: what is Alice's looks to Bob like what does not exist, whatever he
tries with its id. from-users 18 and 20, public-reports G84 and G85."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import httpx2
import pytest
import tinker
from tinker import types

from tests.e2e.client import (
    DATA,
    MODEL,
    PROBE,
    PROTOBUF,
    Raw,
    adam,
    assert_same,
    fingerprint,
    fresh,
    generate,
    new_run,
    pass_body,
    prompt,
    refused,
    sampler_fingerprint,
    step,
    wait,
)
from tests.running_server import RunningServer

Ask = Callable[[Raw, str], httpx2.Response]


@dataclass
class Hers:
    """One of each of Alice's things."""

    run: tinker.TrainingClient
    session: str
    run_id: str
    future: str
    sampler: str
    sample: str
    state: str
    weights: str
    external: str


@pytest.fixture(scope="module")
def hers(service: tinker.ServiceClient, raw: Raw) -> Hers:
    run = new_run(service, seed=41)
    step(run)
    weights = wait(run.save_weights_for_sampler("hers")).path
    run_id = raw.run()
    session = run_id.split(":")[0]
    body = {"session_id": session, "sampling_session_seq_id": 5, "base_model": MODEL}
    sampler = raw.post("create_sampling_session", body).json()["sampling_session_id"]
    sample = raw.promise("asample", _sample_body(sampler, 0))
    raw.outcome(sample)
    future = raw.forward_backward(run_id, 1)
    raw.outcome(future)
    return Hers(
        run=run,
        session=session,
        run_id=run_id,
        future=future,
        sampler=sampler,
        sample=sample,
        state=wait(run.save_state("hers")).path,
        weights=weights,
        external=wait(run.save_weights_external("hers")).path,
    )


@pytest.fixture(scope="module")
def bob(server: RunningServer) -> tinker.ServiceClient:
    return tinker.ServiceClient(base_url=server.url, api_key=server.keys["bob"])


@pytest.fixture(scope="module")
def bob_rest(server: RunningServer) -> tinker.RestClient:
    return tinker.RestClient(base_url=server.url, api_key=server.keys["bob"])


@pytest.fixture(scope="module")
def bob_raw(server: RunningServer) -> Raw:
    return Raw(server.url, server.keys["bob"])


def _sample_body(sampler: str, seq: int) -> dict[str, Any]:
    return {
        "sampling_session_id": sampler,
        "seq_id": seq,
        "num_samples": 1,
        "prompt": {"chunks": [{"type": "encoded_text", "tokens": PROBE}]},
        "sampling_params": {"max_tokens": 2},
    }


def _checkpoint_url(path: str) -> str:
    run, kind, name = path.removeprefix("tinker://").split("/")
    return f"training_runs/{run}/checkpoints/{kind}/{name}"


def _posts(path: str, body: Callable[[Any], dict[str, Any]]) -> Ask:
    return lambda raw, id_: raw.post(path, body(id_))


ON_A_RUN: dict[str, Ask] = {
    "train it": lambda raw, id_: raw.post("forward_backward", pass_body(id_, 50), headers=PROTOBUF),
    "step it": _posts("optim_step", lambda id_: {"model_id": id_, "seq_id": 51}),
    "save it": _posts("save_weights", lambda id_: {"model_id": id_, "seq_id": 52, "path": "x"}),
    "export it": _posts(
        "save_weights_external", lambda id_: {"model_id": id_, "seq_id": 53, "path": "x"}
    ),
    "sample from it": _posts(
        "save_weights_for_sampler",
        lambda id_: {"model_id": id_, "seq_id": 54, "sampling_session_seq_id": 9},
    ),
    "load into it": _posts(
        "load_weights",
        lambda id_: {"model_id": id_, "seq_id": 55, "path": f"tinker://{id_}/weights/x"},
    ),
    "ask about it": _posts("get_info", lambda id_: {"model_id": id_}),
    "read it": lambda raw, id_: raw.get(f"training_runs/{id_}"),
    "list its checkpoints": lambda raw, id_: raw.get(f"training_runs/{id_}/checkpoints"),
}
ON_A_FUTURE: dict[str, Ask] = {
    "retrieve it": _posts("retrieve_future", lambda id_: {"request_id": id_}),
    "cancel it": _posts("cancel_future", lambda id_: {"request_id": id_}),
}
ON_A_SAMPLER: dict[str, Ask] = {
    "sample it": lambda raw, id_: raw.post("asample", _sample_body(id_, 77)),
    "join it": _posts("join_sampling_session", lambda id_: {"sampling_session_id": id_}),
    "read it": lambda raw, id_: raw.get(f"samplers/{id_}"),
    "follow it": _posts(
        "retrieve_futures", lambda id_: {"target": {"sampling_session_id": id_}, "timeout": 0}
    ),
}
ON_A_SESSION: dict[str, Ask] = {
    "read it": lambda raw, id_: raw.get(f"sessions/{id_}"),
    "beat for it": _posts("session_heartbeat", lambda id_: {"session_id": id_}),
    "finish it": lambda raw, id_: raw.post(f"sessions/{id_}/finish", {}),
    "move it": lambda raw, id_: raw.http.put(f"sessions/{id_}/project", json={"project_id": "his"}),
    "make a run in it": _posts(
        "create_model", lambda id_: {"session_id": id_, "model_seq_id": 9, "base_model": MODEL}
    ),
    "make a sampler in it": _posts(
        "create_sampling_session",
        lambda id_: {"session_id": id_, "sampling_session_seq_id": 9, "base_model": MODEL},
    ),
}
ON_A_CHECKPOINT: dict[str, Ask] = {
    "ask about it": _posts("weights_info", lambda path: {"tinker_path": path}),
    "copy it": _posts(
        "copy_weights", lambda path: {"source_path": path, "destination_project_id": "his"}
    ),
    "delete it": lambda raw, path: raw.http.delete(_checkpoint_url(path)),
    "publish it": lambda raw, path: raw.post(_checkpoint_url(path) + "/publish"),
    "unpublish it": lambda raw, path: raw.http.delete(_checkpoint_url(path) + "/publish"),
    "let it expire": lambda raw, path: raw.http.put(
        _checkpoint_url(path) + "/ttl", json={"ttl_seconds": 3600}
    ),
    "download it": lambda raw, path: raw.get(_checkpoint_url(path) + "/external_weights_urls"),
}


def _looks_unknown(raw: Raw, ask: Ask, hers: str, unknown: str) -> None:
    """The same status and the same words, but for the id itself."""
    started = time.monotonic()
    foreign, missing = ask(raw, hers), ask(raw, unknown)
    assert foreign.status_code == missing.status_code == 404, foreign.text
    assert foreign.text.replace(hers, "*") == missing.text.replace(unknown, "*")
    assert time.monotonic() - started < 2


@pytest.mark.parametrize("what", ON_A_RUN)
def test_her_run_looks_unknown(hers: Hers, bob_raw: Raw, what: str) -> None:
    _looks_unknown(bob_raw, ON_A_RUN[what], hers.run_id, "session-0123456789abcdef:train:0")


@pytest.mark.parametrize("what", ON_A_FUTURE)
def test_her_futures_look_unknown(hers: Hers, bob_raw: Raw, what: str) -> None:
    unknown = "session-0123456789abcdef:train:0:1"
    _looks_unknown(bob_raw, ON_A_FUTURE[what], hers.future, unknown)
    _looks_unknown(bob_raw, ON_A_FUTURE[what], hers.sample, unknown)


@pytest.mark.parametrize("what", ON_A_SAMPLER)
def test_her_sampler_looks_unknown(hers: Hers, bob_raw: Raw, what: str) -> None:
    unknown = "session-0123456789abcdef:sample:0"
    _looks_unknown(bob_raw, ON_A_SAMPLER[what], hers.sampler, unknown)


@pytest.mark.parametrize("what", ON_A_SESSION)
def test_her_session_looks_unknown(hers: Hers, bob_raw: Raw, what: str) -> None:
    _looks_unknown(bob_raw, ON_A_SESSION[what], hers.session, "session-0123456789abcdef")


@pytest.mark.parametrize("what", ON_A_CHECKPOINT)
def test_her_checkpoints_look_unknown(hers: Hers, bob_raw: Raw, what: str) -> None:
    for path in (hers.state, hers.weights, hers.external):
        unknown = path.replace("/hers", "/none")
        _looks_unknown(bob_raw, ON_A_CHECKPOINT[what], path, unknown)


def test_he_cannot_resume_or_sample_her_checkpoints(hers: Hers, bob: tinker.ServiceClient) -> None:
    with refused("does not exist"):
        wait(bob.create_training_client_from_state(hers.state))
    with refused("does not exist"):
        wait(bob.create_training_client_from_state_with_optimizer(hers.state))
    with refused("does not exist"):
        wait(bob.create_sampling_client(model_path=hers.weights))
    with refused("does not exist"):
        wait(new_run(bob).load_state(hers.state))


def test_his_lists_hold_nothing_of_hers(
    hers: Hers, bob: tinker.ServiceClient, bob_rest: tinker.RestClient
) -> None:
    own = new_run(bob)
    wait(own.save_state("his"))
    runs = wait(bob_rest.list_training_runs(limit=100))
    assert own.model_id in [run.training_run_id for run in runs.training_runs]
    assert hers.run_id not in [run.training_run_id for run in runs.training_runs]
    paths = [one.tinker_path for one in wait(bob_rest.list_user_checkpoints()).checkpoints]
    assert all(not path.endswith("/hers") for path in paths)
    assert hers.session not in wait(bob_rest.list_sessions(limit=100)).sessions


def test_all_that_left_no_trace(hers: Hers, raw: Raw, service: tinker.ServiceClient) -> None:
    """Her run has the gradient of her one request, her session is open, her checkpoints stand."""
    metrics = raw.outcome(raw.optim_step(hers.run_id, 2)).json()["metrics"]
    assert metrics["num_gradients"] == 1
    assert raw.post("session_heartbeat", {"session_id": hers.session}).is_success
    for path in (hers.state, hers.weights, hers.external):
        assert raw.post("weights_info", {"tinker_path": path}).is_success
    assert_same(
        fingerprint(wait(service.create_training_client_from_state(hers.state))),
        fingerprint(hers.run),
        1e-5,
    )


@pytest.mark.parametrize("key", ["tml-wrong", "tml-", "tml-" + "x" * 5000])
def test_a_wrong_key_is_an_authentication_error(server: RunningServer, key: str) -> None:
    started = time.monotonic()
    with pytest.raises(tinker.AuthenticationError):
        wait(
            tinker.ServiceClient(base_url=server.url, api_key=key).create_sampling_client(
                base_model=MODEL
            )
        )
    assert time.monotonic() - started < 5


def test_no_endpoint_answers_without_a_key(server: RunningServer, hers: Hers) -> None:
    """But for the health check; signed URLs carry their own proof."""
    stranger = Raw(server.url, "")
    asks = {**ON_A_RUN, **ON_A_FUTURE, **ON_A_SAMPLER, **ON_A_SESSION}
    for ask in asks.values():
        assert ask(stranger, hers.run_id).status_code == 401
    for ask in ON_A_CHECKPOINT.values():
        assert ask(stranger, hers.state).status_code == 401
    for path in ("get_server_capabilities", "training_runs", "checkpoints", "sessions"):
        assert stranger.get(path).status_code == 401
    for path in ("client/config", "client/dynamic_config", "create_session"):
        assert stranger.post(path, {"tags": [], "sdk_version": "x"}).status_code == 401
    assert stranger.get("healthz").is_success


def test_a_published_checkpoint_is_visible_until_it_is_unpublished(
    service: tinker.ServiceClient,
    rest: tinker.RestClient,
    bob: tinker.ServiceClient,
    bob_rest: tinker.RestClient,
    hers: Hers,
) -> None:
    """from-users 18: and unpublish is not delete."""
    state = wait(hers.run.save_state(fresh("public"))).path
    weights = wait(hers.run.save_weights_for_sampler(fresh("public"))).path
    for path in (state, weights):
        wait(rest.publish_checkpoint_from_tinker_path(path))
        wait(rest.publish_checkpoint_from_tinker_path(path))
    expected = fingerprint(hers.run)
    assert wait(bob_rest.get_weights_info_by_tinker_path(state)).lora_rank == 8
    resumed = wait(bob.create_training_client_from_state(state))
    assert_same(fingerprint(resumed), expected, 1e-5)
    sampler = wait(bob.create_sampling_client(model_path=weights))
    assert_same(sampler_fingerprint(sampler), expected)
    with refused("does not exist"):
        wait(bob_rest.delete_checkpoint_from_tinker_path(state))
    with refused("does not exist"):
        wait(bob_rest.unpublish_checkpoint_from_tinker_path(state))
    for path in (state, weights):
        wait(rest.unpublish_checkpoint_from_tinker_path(path))
        wait(rest.unpublish_checkpoint_from_tinker_path(path))
    with refused("does not exist"):
        wait(bob_rest.get_weights_info_by_tinker_path(state))
    with refused("does not exist"):
        wait(bob.create_training_client_from_state(state))
    with refused("does not exist"):
        wait(bob.create_sampling_client(model_path=weights))
    again = wait(service.create_training_client_from_state(state))
    assert_same(fingerprint(again), expected, 1e-5)


def test_a_copy_is_his_own(
    rest: tinker.RestClient, bob: tinker.ServiceClient, bob_rest: tinker.RestClient, hers: Hers
) -> None:
    """It stays when hers is unpublished and deleted, and she cannot see it."""
    state = wait(hers.run.save_state(fresh("to-copy"))).path
    wait(rest.publish_checkpoint_from_tinker_path(state))
    copied = wait(bob_rest.copy_weights(state, "his"))
    wait(rest.delete_checkpoint_from_tinker_path(state))
    with refused("does not exist"):
        wait(rest.get_weights_info_by_tinker_path(copied))
    resumed = wait(bob.create_training_client_from_state(copied))
    assert_same(fingerprint(resumed), fingerprint(hers.run), 1e-5)


def test_tenants_who_train_at_once_get_what_they_get_alone(
    service: tinker.ServiceClient, bob: tinker.ServiceClient
) -> None:
    clients = [service, bob, service, bob]
    runs = [new_run(client, seed=9) for client in clients]
    futures = [
        (run.forward_backward(DATA, "cross_entropy"), run.optim_step(adam())) for run in runs
    ]
    for pair in futures:
        for future in pair:
            wait(future)
    alone = new_run(bob, seed=9)
    step(alone)
    for run in runs:
        assert_same(fingerprint(run), fingerprint(alone), 1e-5)
    assert generate(wait(bob.create_sampling_client(base_model=MODEL)), PROBE, 1).tokens
    assert prompt(PROBE) == types.ModelInput.from_ints(PROBE)
