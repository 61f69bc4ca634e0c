"""Whatever a client sends, the answer is no 5xx, and says what it is in JSON."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests import bodies
from tests.api.client import Client
from tests.api.mutations import mutated

RUN, SESSION, SAMPLER = "RUN", "SESSION", "SAMPLER"
BODIES: dict[str, dict[str, Any]] = {
    "create_session": {
        "tags": ["a"],
        "user_metadata": {"a": 1},
        "sdk_version": "0.38.0",
        "project_id": "p",
        "display_name": "d",
    },
    "client/config": {"sdk_version": "0.38.0", "type": "client_config"},
    "session_heartbeat": {"session_id": SESSION},
    "sessions/SESSION/finish": {"reason": {"type": "success"}, "detail": "d"},
    "create_model": {
        "session_id": SESSION,
        "model_seq_id": 5,
        "base_model": "tiny/fake",
        "user_metadata": {"a": [1]},
        "lora_config": {
            "rank": 4,
            "seed": 1,
            "train_unembed": True,
            "train_mlp": True,
            "train_attn": True,
        },
        "optimizer_config": {"type": "adamw"},
    },
    "get_info": {"model_id": RUN},
    "forward_backward": bodies.forward_backward(RUN, 1, [1, 2]),
    "optim_step": {
        "model_id": RUN,
        "seq_id": 1,
        "adam_params": {"learning_rate": 0.1, "beta1": 0.9, "eps": 1e-8, "grad_clip_norm": 1.0},
    },
    "save_weights": {
        "model_id": RUN,
        "seq_id": 1,
        "path": "name",
        "ttl_seconds": 7200,
        "overwrite": True,
        "user_metadata": {"a": "b"},
    },
    "save_weights_for_sampler": {
        "model_id": RUN,
        "seq_id": 1,
        "sampling_session_seq_id": 7,
        "kind": "snapshot",
    },
    "save_weights_external": {
        "model_id": RUN,
        "seq_id": 1,
        "path": "name",
        "ttl_seconds": 7200,
        "age_encryption_recipients": [],
    },
    "load_weights": {
        "model_id": RUN,
        "seq_id": 1,
        "session_id": SESSION,
        "model_seq_id": 6,
        "path": "tinker://RUN/weights/name",
        "optimizer": True,
    },
    "create_sampling_session": {
        "session_id": SESSION,
        "sampling_session_seq_id": 9,
        "base_model": "tiny/fake",
        "model_path": "tinker://RUN/sampler_weights/name",
    },
    "join_sampling_session": {"sampling_session_id": SAMPLER},
    "asample": {
        **bodies.sample(SAMPLER, 1, [1, 2, 3]),
        "sampling_params": {
            "max_tokens": 3,
            "seed": 1,
            "stop": ["x"],
            "temperature": 0.5,
            "top_k": 5,
            "top_p": 0.9,
        },
        "prompt_logprobs": True,
        "prompt_logprobs_last_n": 1,
        "topk_prompt_logprobs": 1,
        "target_prompt_logprobs": {"data": [1, 2], "dtype": "int64", "shape": [2, 1]},
    },
    "retrieve_future": {"request_id": "RUN:0"},
    "retrieve_futures": {
        "target": {"sampling_session_id": SAMPLER, "cloned_sampler_id": 0},
        "prev_cursor": 0,
        "timeout": 0.0,
        "retrieved_request_ids": ["a"],
    },
    "cancel_future": {"request_id": "RUN:0"},
    "weights_info": {"tinker_path": "tinker://RUN/weights/name"},
    "copy_weights": {
        "source_path": "tinker://RUN/weights/name",
        "destination_project_id": "p",
        "ttl_seconds": 7200,
    },
    "PUT sessions/SESSION/project": {"project_id": "p"},
    "PUT training_runs/RUN/checkpoints/weights/name/ttl": {"ttl_seconds": 7200},
}


def named(value: Any, names: dict[str, str]) -> Any:
    """A body with the ids of this test in place of RUN, SESSION and SAMPLER."""
    match value:
        case str():
            for placeholder, name in names.items():
                value = value.replace(placeholder, name)
            return value
        case dict():
            return {key: named(part, names) for key, part in value.items()}
        case list():
            return [named(part, names) for part in value]
        case _:
            return value


@pytest.fixture
async def names(client: Client) -> dict[str, str]:
    session = await client.session()
    run = await client.run(session)
    await client.saved(run, 1, "name")
    await client.saved_for_sampler(run, 2, "name")
    return {RUN: run, SESSION: session, SAMPLER: await client.sampler(session)}


@pytest.mark.parametrize("route", BODIES)
@settings(
    max_examples=40,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(draw=st.data())
async def test_no_body_makes_the_server_fail(
    client: Client, names: dict[str, str], route: str, draw: st.DataObject
):
    method, _, path = route.rpartition(" ")
    body = named(BODIES[route], names)
    for content in draw.draw(st.lists(mutated(body), min_size=4, max_size=4)):
        response = await client.request(method or "POST", named(path, names), content=content)
        assert response.status_code < 500, (response.text, content[:500])
        assert response.status_code not in {409, 422}
        if response.status_code >= 400:
            assert response.json()
            assert response.headers["x-should-retry"] == (
                "true" if response.status_code == 429 else "false"
            )


odd_text = st.text(max_size=30) | st.sampled_from(["..", "%2e%2e", "a:b:c", "\0", "x" * 2000])


@settings(
    max_examples=80, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    route=st.sampled_from(
        [
            "GET training_runs/{}",
            "GET training_runs/{}/checkpoints",
            "GET sessions/{}",
            "GET samplers/{}",
            "POST sessions/{}/finish",
            "DELETE training_runs/x/checkpoints/weights/{}",
            "DELETE training_runs/x/checkpoints/{}/x",
            "POST training_runs/{}/checkpoints/weights/x/publish",
            "GET training_runs/x/checkpoints/external_weights/{}/external_weights_urls",
            "GET files/{}/x?expires=1&signature=x",
            "GET files/x/y?expires={}&signature=x",
            "GET files/x/y?expires=1&signature={}",
            "GET training_runs?limit={}",
            "GET training_runs?project_id={}",
            "GET checkpoints?offset={}",
            "GET sessions?offset={}",
        ]
    ),
    text=odd_text,
)
async def test_no_address_makes_the_server_fail(client: Client, route: str, text: str):
    from urllib.parse import quote

    method, _, path = route.partition(" ")
    url = path.format(quote(text, safe=""))
    content = b"{}" if method == "POST" else None
    response = await client.request(method, url, content=content)
    assert response.status_code < 500, (url, response.text)


@settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    encoding=st.sampled_from(["zstd", "gzip", "br", "identity", "ünknown", ""]),
    content_type=st.sampled_from(["application/x-protobuf", "application/json", "text/plain", ""]),
    content=st.binary(max_size=100),
)
async def test_no_encoding_makes_the_server_fail(
    client: Client, encoding: str, content_type: str, content: bytes
):
    headers = {"content-encoding": encoding.encode("latin-1"), "content-type": content_type}
    for route in ("forward_backward", "asample", "create_session"):
        response = await client.post(route, content=content, headers=headers)
        assert response.status_code < 500, response.text
