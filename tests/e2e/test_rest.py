"""Every public method of RestClient and AdminClient, by the real SDK. The last test says so."""

from __future__ import annotations

import inspect
import json
import urllib.error
import urllib.request
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
import tinker
from tinker import types

from tests.e2e.client import (
    DATA,
    MODEL,
    UNTIED,
    WAIT_S,
    Raw,
    adam,
    download,
    fresh,
    generate,
    new_run,
    text,
    train,
    wait,
)
from tests.running_server import RunningServer

ALICE = "tml:organization_user:alice"
pytestmark = pytest.mark.filterwarnings("ignore::tinker.lib.experimental.ExperimentalWarning")


class Work:
    """What Alice has made: a run that was trained and saved."""

    def __init__(self, service: tinker.ServiceClient) -> None:
        self.run = new_run(service, user_metadata={"kind": "rest"})
        train(self.run, 2)
        self.state: str = wait(self.run.save_state(fresh("rest"))).path
        self.weights: str = wait(self.run.save_weights_for_sampler(fresh("rest"))).path
        self.exported: str = wait(self.run.save_weights_external(fresh("rest"))).path
        self.id = self.run.model_id
        self.session = self.id.split(":")[0]


@pytest.fixture(scope="module")
def work(service: tinker.ServiceClient) -> Work:
    return Work(service)


@pytest.fixture(scope="module")
def admin(server: RunningServer) -> tinker.AdminClient:
    return tinker.AdminClient(base_url=server.url, api_key=server.keys["alice"])


@pytest.fixture(scope="module")
def bob(server: RunningServer) -> tinker.RestClient:
    return tinker.RestClient(base_url=server.url, api_key=server.keys["bob"])


def listed(rest: tinker.RestClient, work: Work) -> dict[str, types.Checkpoint]:
    return {one.tinker_path: one for one in wait(rest.list_checkpoints(work.id)).checkpoints}


def fetch(url: str) -> bytes:
    """As anybody could who has the link."""
    with urllib.request.urlopen(url, timeout=WAIT_S) as answer:
        return answer.read()


# ---------------------------------------------------------------- who and what


def test_get_server_capabilities(rest: tinker.RestClient) -> None:
    models = wait(rest.get_server_capabilities()).supported_models
    assert [(one.model_name, one.trainable, one.sampleable) for one in models] == [
        (MODEL, True, True),
        (UNTIED, True, True),
    ]


def test_whoami(rest: tinker.RestClient, service: tinker.ServiceClient) -> None:
    for client in (rest, service.create_rest_client()):
        me = wait(client.whoami())
        assert me.user_urn == ALICE
        assert me.org_urn.startswith("tml:organization:")
        assert me.email


def test_a_token_alone_is_a_credential(server: RunningServer, raw: Raw) -> None:
    jwt = raw.post("auth/token").json()["jwt"]
    client = tinker.RestClient(base_url=server.url, api_key=jwt)
    assert wait(client.whoami()).user_urn == ALICE
    wait(client.list_sessions())


def test_a_server_without_keys_has_somebody_too(own_server: RunningServer) -> None:
    client = tinker.RestClient(base_url=own_server.url, api_key="tml-anything")
    assert wait(client.whoami()).user_urn == "tml:organization_user:local"


# ---------------------------------------------------------------- runs and sessions


def test_get_training_run(rest: tinker.RestClient, work: Work) -> None:
    run = wait(rest.get_training_run(work.id))
    assert run.training_run_id == work.id
    assert run.base_model == MODEL
    assert run.model_owner == ALICE
    assert run.lora_rank == 8
    assert run.user_metadata == {"kind": "rest"}
    assert run.last_checkpoint is not None
    assert run.last_checkpoint.tinker_path == work.state
    assert run.last_sampler_checkpoint is not None
    assert run.last_sampler_checkpoint.tinker_path == work.weights
    assert wait(rest.get_training_run(work.id, access_scope="accessible")) == run


def test_get_training_run_by_tinker_path(rest: tinker.RestClient, work: Work) -> None:
    run = wait(rest.get_training_run_by_tinker_path(work.state))
    assert run == wait(rest.get_training_run(work.id))


def test_list_training_runs(rest: tinker.RestClient, work: Work) -> None:
    first = wait(rest.list_training_runs(limit=1))
    assert len(first.training_runs) == 1
    total = first.cursor.total_count
    every = wait(rest.list_training_runs(limit=total, access_scope="accessible")).training_runs
    assert work.id in [run.training_run_id for run in every]
    assert len(wait(rest.list_training_runs(limit=5, offset=total)).training_runs) == 0
    assert wait(rest.list_training_runs(project_id="no-such-project")).training_runs == []


def test_get_session_and_list_sessions(rest: tinker.RestClient, work: Work) -> None:
    session = wait(rest.get_session(work.session))
    assert work.id in session.training_run_ids
    assert work.session in wait(rest.list_sessions(limit=100, access_scope="owned")).sessions


def test_get_sampler(rest: tinker.RestClient, service: tinker.ServiceClient, work: Work) -> None:
    wait(service.create_sampling_client(model_path=work.weights))
    samplers = wait(rest.get_session(work.session)).sampler_ids
    found = [wait(rest.get_sampler(sampler)) for sampler in samplers]
    assert (MODEL, work.weights) in [(one.base_model, one.model_path) for one in found]


def test_search_sessions(rest: tinker.RestClient, server: RunningServer) -> None:
    name = fresh("searched for")
    services = [
        tinker.ServiceClient(
            base_url=server.url,
            api_key=server.keys["alice"],
            display_name=f"{name} {number}",
            user_metadata={"number": str(number)},
        )
        for number in range(3)
    ]
    sessions = [service.holder.get_session_id() for service in services]
    wait(services[0].close("errored", detail="on purpose"))

    def find(**query: Any) -> list[str]:
        request = types.SessionSearchRequest(display_name=name.upper(), **query)
        return [one.session_id for one in wait(rest.search_sessions(request)).sessions]

    assert find() == sessions[::-1]
    assert find(user_metadata={"number": "1"}) == [sessions[1]]
    assert find(project_ids=["nowhere"]) == []
    assert find(owner=types.UserSearchOwner(owner_urns=[ALICE])) == sessions[::-1]
    assert find(statuses=[types.ActiveSessionStatusQuery()]) == sessions[:0:-1]
    ended = types.ClientFinishedSessionStatusQuery(reasons=["errored"])
    assert find(statuses=[ended]) == [sessions[0]]

    seen: list[types.SessionSummary] = []
    cursor = None
    while cursor is not None or not seen:
        request = types.SessionSearchRequest(display_name=name, limit=2, cursor=cursor)
        page = wait(rest.search_sessions(request))
        seen += page.sessions
        cursor = page.next_cursor
    assert [one.session_id for one in seen] == sessions[::-1]
    assert isinstance(seen[-1].status, types.ClientSessionFinished)
    assert seen[-1].status.detail == "on purpose"


def test_assign_session_project(rest: tinker.RestClient, server: RunningServer) -> None:
    service = tinker.ServiceClient(base_url=server.url, api_key=server.keys["alice"])
    run = new_run(service)
    wait(rest.assign_session_project(service.holder.get_session_id(), "archive"))
    runs = wait(rest.list_training_runs(project_id="archive")).training_runs
    assert [one.training_run_id for one in runs] == [run.model_id]


def test_export_session_trace(rest: tinker.RestClient, work: Work) -> None:
    trace = json.loads(fetch(wait(rest.export_session_trace(work.session))))
    slices = [event for event in trace["traceEvents"] if event["ph"] == "X"]
    computed = [one["name"] for one in slices if one["cat"] == "compute"]
    assert {"create", "forward_backward", "optim_step", "save"} <= set(computed)
    assert all(one["dur"] >= 0 and one["ts"] >= 0 for one in slices)
    assert any(one["dur"] > 0 for one in slices if one["cat"] == "compute")


# ---------------------------------------------------------------- checkpoints


def test_list_checkpoints_of_a_run_and_of_a_user(rest: tinker.RestClient, work: Work) -> None:
    of_run = listed(rest, work)
    assert {work.state, work.weights, work.exported} <= of_run.keys()
    kinds = [of_run[path].checkpoint_type for path in (work.state, work.weights, work.exported)]
    assert kinds == ["training", "sampler", "external"]
    assert all(one.size_bytes and one.size_bytes > 0 for one in of_run.values())
    page = wait(rest.list_user_checkpoints(limit=1000, offset=0))
    assert page.cursor is not None
    assert page.cursor.total_count == len(page.checkpoints)
    assert of_run.keys() <= {one.tinker_path for one in page.checkpoints}
    times = [one.time for one in page.checkpoints]
    assert times == sorted(times, reverse=True)


def test_get_weights_info_by_tinker_path(rest: tinker.RestClient, work: Work) -> None:
    info = wait(rest.get_weights_info_by_tinker_path(work.state))
    assert (info.base_model, info.is_lora, info.lora_rank) == (MODEL, True, 8)


def test_get_external_weights_urls(rest: tinker.RestClient, work: Work, tmp_path: Path) -> None:
    answer = wait(rest.get_external_weights_urls(work.exported))
    assert answer.expires > datetime.now(UTC)
    files = download(rest, work.exported, tmp_path / "export")
    assert {file.name for file in files.iterdir()} == {
        "adapter_config.json",
        "adapter_model.safetensors",
    }
    url = next(iter(answer.urls.values()))
    with pytest.raises(urllib.error.HTTPError, match="404"):
        fetch(url.replace("signature=", "signature=0"))


def test_publish_and_unpublish(rest: tinker.RestClient, bob: tinker.RestClient, work: Work) -> None:
    """from-users 18"""
    for repeat in range(2):
        with pytest.raises(tinker.NotFoundError):
            wait(bob.get_weights_info_by_tinker_path(work.weights))
        with pytest.raises(tinker.NotFoundError):
            wait(bob.publish_checkpoint_from_tinker_path(work.weights))
        for _ in range(repeat + 1):
            wait(rest.publish_checkpoint_from_tinker_path(work.weights))
        assert listed(rest, work)[work.weights].public
        wait(bob.get_weights_info_by_tinker_path(work.weights))
        with pytest.raises(tinker.NotFoundError):
            wait(bob.unpublish_checkpoint_from_tinker_path(work.weights))
        for _ in range(repeat + 1):
            wait(rest.unpublish_checkpoint_from_tinker_path(work.weights))
        assert not listed(rest, work)[work.weights].public


def test_set_checkpoint_ttl_from_tinker_path(rest: tinker.RestClient, work: Work) -> None:
    """from-users 4: set, prolonged and taken away, without anything being loaded."""
    for seconds in (3600, 7200):
        wait(rest.set_checkpoint_ttl_from_tinker_path(work.state, seconds))
        expires = listed(rest, work)[work.state].expires_at
        assert expires is not None
        left = expires - datetime.now(UTC)
        assert timedelta(0) <= timedelta(seconds=seconds) - left < timedelta(seconds=60)
    wait(rest.set_checkpoint_ttl_from_tinker_path(work.state, None))
    assert listed(rest, work)[work.state].expires_at is None
    for seconds in (3599, 10 * 365 * 24 * 3600 + 1):
        with pytest.raises(tinker.BadRequestError, match=r"3600.*315360000"):
            wait(rest.set_checkpoint_ttl_from_tinker_path(work.state, seconds))


def test_delete_checkpoint_by_id_and_by_path(rest: tinker.RestClient, work: Work) -> None:
    for by_path in (True, False):
        path = wait(work.run.save_state(fresh("deleted"))).path
        if by_path:
            wait(rest.delete_checkpoint_from_tinker_path(path))
        else:
            wait(rest.delete_checkpoint(work.id, listed(rest, work)[path].checkpoint_id))
        assert path not in listed(rest, work)
        with pytest.raises(tinker.NotFoundError):
            wait(rest.delete_checkpoint_from_tinker_path(path))


def test_copy_weights(
    rest: tinker.RestClient, service: tinker.ServiceClient, raw: Raw, work: Work
) -> None:
    copied = wait(rest.copy_weights(work.weights, "archive", ttl_seconds=3600))
    assert copied != work.weights
    sampler = wait(service.create_sampling_client(model_path=copied))
    original = wait(service.create_sampling_client(model_path=work.weights))
    prompt = text(5)
    assert (
        generate(sampler, prompt, 5, temperature=0).tokens
        == generate(original, prompt, 5, temperature=0).tokens
    )
    run = wait(rest.get_training_run_by_tinker_path(copied))
    body = {"model_id": run.training_run_id, "seq_id": 1, "path": "x"}
    refused = raw.post("save_weights", body)
    assert (refused.status_code, "copied checkpoints" in refused.text) == (400, True)
    wait(rest.delete_checkpoint_from_tinker_path(copied))
    assert work.weights in listed(rest, work)


# ---------------------------------------------------------------- admin


def hour_of_now() -> tuple[datetime, datetime]:
    start = datetime.now(UTC).replace(minute=0, second=0, microsecond=0) - timedelta(hours=1)
    return start, start + timedelta(hours=2)


def used(admin: tinker.AdminClient, session: str) -> dict[tuple[str, bool | None], int]:
    """By kind of event and, of prompts, whether they came from the cache."""
    window = hour_of_now()
    counts: dict[tuple[str, bool | None], int] = {}
    for event in wait(admin.get_billing_usage(*window)).data:
        if event.session_id == session:
            info = event.event_info
            key = info.type, getattr(info, "cached", None)
            count = getattr(info, "token_count", None) or getattr(info, "count", 0)
            counts[key] = counts.get(key, 0) + count
    return counts


def test_get_billing_usage(server: RunningServer, admin: tinker.AdminClient) -> None:
    service = tinker.ServiceClient(
        base_url=server.url, api_key=server.keys["alice"], user_metadata={"team": "red"}
    )
    session = service.holder.get_session_id()
    run = new_run(service)
    wait(run.forward_backward(DATA, "cross_entropy"))
    wait(run.forward(DATA, "cross_entropy"))
    wait(run.optim_step(adam()))
    wait(run.save_state(fresh("billed")))
    sampler = wait(service.create_sampling_client(base_model=MODEL))
    prompt = text(77, 40)
    hits = 0
    for _ in range(2):
        params = types.SamplingParams(max_tokens=3, stop=[])
        sampled = wait(sampler.sample(types.ModelInput.from_ints(prompt), 2, params))
        hits += sampled.prompt_cache_hit_tokens or 0
    tokens = DATA[0].model_input.length
    expected = {
        ("training", None): 2 * tokens,
        ("sampling_prefill", False): 2 * len(prompt) - hits,
        ("sampling_prefill", True): hits,
        ("sampling_sample", None): 2 * 2 * 3,
        ("checkpoint", None): 1,
    }
    assert hits > 0
    assert used(admin, session) == expected
    answer = wait(admin.get_billing_usage(*hour_of_now()))
    assert answer.sessions[session].user_metadata == {"team": "red"}
    mine = [event for event in answer.data if event.session_id == session]
    assert {(event.base_model, event.user_id) for event in mine} == {(MODEL, ALICE)}


def test_get_current_checkpoint_storage_usage(
    rest: tinker.RestClient, admin: tinker.AdminClient, work: Work
) -> None:
    rows = wait(admin.get_current_checkpoint_storage_usage()).data
    every = wait(rest.list_user_checkpoints(limit=1000)).checkpoints
    assert sum(row.checkpoint_count for row in rows) == len(every)
    assert sum(row.size_bytes for row in rows) == sum(one.size_bytes or 0 for one in every)
    nothing = wait(admin.get_current_checkpoint_storage_usage(project_id="nowhere"))
    assert nothing.data == []


def test_get_audit_log(admin: tinker.AdminClient, work: Work) -> None:
    entries = wait(admin.get_audit_log(event_type="checkpoints")).entries
    made = [entry for entry in entries if entry.event == "checkpoint_created"]
    assert work.state in [entry.tinker_path for entry in made]
    assert {entry.event_details["actor"] for entry in made} == {ALICE}
    keys = wait(admin.get_audit_log(event_type="organizations")).entries
    assert "apikey_created" in [entry.event for entry in keys]
    yesterday = datetime.now(UTC).date() - timedelta(days=1)
    assert wait(admin.get_audit_log(day=yesterday)).entries == []


def test_old_names_of_admin_calls(rest: tinker.RestClient, work: Work) -> None:
    assert wait(rest.get_audit_log()).entries
    assert wait(rest.get_billing_usage(*hour_of_now())).data
    assert wait(rest.get_current_checkpoint_storage_usage()).data


# ---------------------------------------------------------------- encryption


def test_an_export_for_a_recipient_is_read_by_that_recipient(
    rest: tinker.RestClient, work: Work, tmp_path: Path
) -> None:
    pyrage = pytest.importorskip("pyrage")
    reader = pyrage.x25519.Identity.generate()
    saved = wait(
        work.run.save_weights_external(
            fresh("secret"), age_encryption_recipients=[str(reader.to_public())]
        )
    )
    secret = download(rest, saved.path, tmp_path / "secret")
    plain = download(rest, work.exported, tmp_path / "plain")
    assert {file.name for file in secret.iterdir()} == {
        f"{file.name}.age" for file in plain.iterdir()
    }
    for file in plain.iterdir():
        encrypted = (secret / f"{file.name}.age").read_bytes()
        assert pyrage.decrypt(encrypted, [reader]) == file.read_bytes()


def test_a_bad_recipient_is_refused_by_its_name(work: Work) -> None:
    with pytest.raises(tinker.BadRequestError, match="age1wrong"):
        wait(
            work.run.save_weights_external(fresh("secret"), age_encryption_recipients=["age1wrong"])
        )
    wait(work.run.forward(DATA, "cross_entropy"))


# ---------------------------------------------------------------- all of it


def test_every_public_method_is_tested_here() -> None:
    """`_async` twins only call the method they are named after."""
    source = Path(__file__).read_text()
    for client in (tinker.RestClient, tinker.AdminClient):
        for name, _ in inspect.getmembers(client, callable):
            if name.startswith("_") or name.endswith("_async") or name == "get_telemetry":
                continue
            assert f".{name}(" in source, name
