"""Every error under /oai is one that OpenAI's clients read."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from typing import Any

import pytest

from backends.contract import Failure
from server.settings import Settings
from tests.api.client import Client
from tests.api.oai.client import MODEL, Oai
from tests.api.oai.writer import Writer

NAN = float("nan")


def assert_error(response: Any, status: int, **expected: object) -> str:
    assert response.status_code == status, response.text
    assert set(response.json()) == {"error"}
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    for name, value in expected.items():
        assert error[name] == value, error
    assert response.headers["x-should-retry"] == ("true" if status in (408, 429, 503) else "false")
    return error["message"]


CHATS: list[tuple[dict[str, Any], str]] = [
    ({"messages": []}, "messages"),
    ({"messages": "Hi"}, "messages"),
    ({"messages": [{"content": "Hi"}]}, "messages"),
    ({"messages": [{"role": "tool", "content": "Hi"}]}, "messages[0].role"),
    ({"messages": [{"role": "user"}]}, "messages[0].content"),
    ({"messages": [{"role": "user", "content": 1}]}, "messages[0].content"),
    ({"messages": [{"role": "user", "content": []}]}, "messages[0].content"),
    ({"messages": [{"role": "user", "content": ["Hi"]}]}, "messages[0].content[0]"),
    (
        {
            "messages": [
                {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}
            ]
        },
        "messages[0].content[0]",
    ),
    (
        {"messages": [{"role": "assistant", "content": "x", "tool_calls": [{}]}]},
        "messages[0].tool_calls",
    ),
    ({"messages": [{"role": "user", "content": "refuse"}]}, "messages"),
    ({"model": None}, "model"),
    ({"temperature": 3}, "temperature"),
    ({"temperature": "hot"}, "temperature"),
    ({"top_p": 0}, "top_p"),
    ({"top_k": -2}, "top_k"),
    ({"n": 0}, "n"),
    ({"n": True}, "n"),
    ({"n": 129}, "n"),
    ({"max_tokens": 0}, "max_tokens"),
    ({"max_completion_tokens": -1}, "max_completion_tokens"),
    ({"seed": 1.5}, "seed"),
    ({"stop": ""}, "stop"),
    ({"stop": [1]}, "stop"),
    ({"stop": ["x"] * 17}, "stop"),
    ({"stop": "x" * 1001}, "stop"),
    ({"stream": "yes"}, "stream"),
    ({"logprobs": 3}, "logprobs"),
    ({"top_logprobs": 2}, "top_logprobs"),
    ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
    ({"tools": [{"type": "function"}]}, "tools"),
    ({"response_format": {"type": "json_object"}}, "response_format"),
    ({"logit_bias": {"5": 1}}, "logit_bias"),
    ({"presence_penalty": 0.5}, "presence_penalty"),
]
COMPLETIONS: list[tuple[dict[str, Any], str]] = [
    ({"prompt": None}, "prompt"),
    ({"prompt": []}, "prompt"),
    ({"prompt": ""}, "prompt"),
    ({"prompt": {"x": 1}}, "prompt"),
    ({"prompt": [1, "x"]}, "prompt"),
    ({"prompt": [1.5]}, "prompt"),
    ({"prompt": [["x"]]}, "prompt"),
    ({"prompt": [[]]}, "prompt"),
    ({"prompt": ["x", 1]}, "prompt"),
    ({"prompt": [300]}, "prompt"),
    ({"prompt": [-1]}, "prompt"),
    ({"prompt": [2**70]}, "prompt"),
    ({"prompt": ["x"] * 2049}, "prompt"),
    ({"prompt": [True]}, "prompt"),
    ({"logprobs": True}, "logprobs"),
    ({"best_of": 3}, "best_of"),
    ({"suffix": "x"}, "suffix"),
    ({"echo": True, "stream": True, "logprobs": 1}, "echo"),
]


@pytest.mark.parametrize(("wrong", "param"), CHATS, ids=str)
async def test_a_chat_that_makes_no_sense(
    oai: Oai, backend: Writer, wrong: dict[str, Any], param: str
) -> None:
    message = assert_error(await oai.chat(**wrong), 400, type="invalid_request_error", param=param)
    assert param in message
    assert backend.sampled == []


@pytest.mark.parametrize(("wrong", "param"), COMPLETIONS, ids=lambda one: str(one)[:60])
async def test_a_completion_that_makes_no_sense(
    oai: Oai, backend: Writer, wrong: dict[str, Any], param: str
) -> None:
    body = {"prompt": "Hi", **wrong}
    message = assert_error(await oai.complete(**body), 400, param=param)
    assert param in message
    assert backend.sampled == []


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b"null", b'{"model": NaN}', b"\xff"])
async def test_a_body_that_is_no_request(oai: Oai, content: bytes) -> None:
    for path in ("chat/completions", "completions"):
        assert_error(await oai.http.post(path, content=content), 400)


async def test_numbers_that_are_none(oai: Oai) -> None:
    for name in ("temperature", "top_p"):
        for value in (b"NaN", b"Infinity", b"-Infinity"):
            body = b'{"model": "tiny/fake", "prompt": "x", "%s": %s}' % (name.encode(), value)
            assert_error(await oai.http.post("completions", content=body), 400, param=name)


async def test_a_prompt_that_does_not_fit(oai: Oai) -> None:
    for prompt in ("x" * 128, "x" * 100_000):
        assert_error(
            await oai.complete(prompt), 400, param="prompt", code="context_length_exceeded"
        )
        assert_error(await oai.chat(prompt), 400, code="context_length_exceeded")


@pytest.mark.parametrize(
    "name", ["gpt-4o", "", "tinker://x", "tinker://run/sampler_weights/none", "x" * 5000]
)
async def test_a_model_that_is_not_there(oai: Oai, name: str) -> None:
    assert_error(await oai.chat(model=name), 404, param="model", code="model_not_found")
    assert_error(await oai.complete(model=name), 404, code="model_not_found")
    if name:
        assert_error(await oai.http.get(f"models/{name}"), 404, code="model_not_found")


async def test_a_checkpoint_of_another_kind_or_deleted(oai: Oai, client: Client) -> None:
    run = await client.run()
    training = await client.saved(run, 1, "training")
    assert_error(await oai.chat(model=training), 404, code="model_not_found")
    path = await client.saved_for_sampler(run, 2, "gone")
    _, kind, name = path.removeprefix("tinker://").split("/")
    await client.delete(f"training_runs/{run}/checkpoints/{kind}/{name}")
    assert_error(await oai.chat(model=path), 404, code="model_not_found")


async def test_keys_and_tenants(oai: Oai, client: Client) -> None:
    keys = client.rooms.keys
    alices = Client(client.app, **{"x-api-key": await keys.create("alice", "alice", "p")})
    alice = Oai(client.app, alices.headers["x-api-key"])
    bob = Oai(client.app, await keys.create("bob", "bob", "p"))
    for stranger in (oai, Oai(client.app, "tml-wrong")):
        for response in (await stranger.chat(), await stranger.http.get("models")):
            assert_error(response, 401, code="invalid_api_key")
    run = await alices.run()
    path = await alices.saved_for_sampler(run, 1, "hers")
    assert (await alice.chat(model=path)).status_code == 200
    foreign, missing = await bob.chat(model=path), await bob.chat(model=path + "x")
    assert assert_error(foreign, 404) == assert_error(missing, 404).replace(path + "x", path)
    assert path not in (await bob.http.get("models")).text
    await alices.post(f"training_runs/{run}/checkpoints/sampler_weights/hers/publish")
    assert (await bob.chat(model=path)).status_code == 200
    for each in (alices, alice.http, bob.http):
        await each.aclose()


async def test_a_model_that_cannot_chat(oai: Oai, client: Client) -> None:
    text = await client.rooms.oai.models.text(MODEL)
    text._chat = "has no chat template"
    message = assert_error(await oai.chat(), 400, param="model")
    assert message == "model 'tiny/fake' has no chat template."
    assert (await oai.complete()).status_code == 200


async def test_no_more_may_wait_than_in_the_tinker_api(
    oai: Oai, client: Client, backend: Writer
) -> None:
    assert_error(await oai.complete(["x"] * 4), 429, code="rate_limit_exceeded")
    assert_error(await oai.complete(["x"] * 4, stream=True), 429, code="rate_limit_exceeded")
    backend.by_steps()
    waiting = asyncio.create_task(oai.complete(["x"] * 3))
    await backend.asked(3)
    assert_error(await oai.chat(), 429)
    refused = await client.ask(
        "asample", **_tinker_sample(await client.sampler(await client.session()))
    )
    assert refused.status_code == 429
    assert len(client.rooms.samplers.adapters_in_use()) == 0
    backend.step(100)
    assert (await waiting).status_code == 200
    assert (await oai.chat()).status_code == 200


def _tinker_sample(sampler: str) -> dict[str, Any]:
    return {
        "sampling_session_id": sampler,
        "seq_id": 1,
        "prompt": {"chunks": [{"type": "encoded_text", "tokens": [1]}]},
    }


async def test_what_goes_wrong_in_the_engine(oai: Oai, backend: Writer, client: Client) -> None:
    backend.fail_with = Failure(message="too big", category="user")
    assert_error(await oai.chat(), 400, message="too big")
    backend.fail_with = Failure(message="broken", category="server")
    assert_error(await oai.chat(), 500, type="server_error", message="broken")
    backend.fail_with = None
    backend.deaths = 2
    assert (await oai.chat()).status_code == 200, "another engine does it"
    backend.deaths = 3
    assert_error(await oai.chat(), 503)
    backend.deaths = 3
    assert_error(await oai.chat(stream=True), 503)
    client.rooms.drain()
    assert_error(await oai.chat(), 503)


async def test_408_when_a_body_stands_still(oai: Oai, client: Client, settings: Settings) -> None:
    async def stalling() -> AsyncGenerator[bytes]:
        yield b"{"
        await asyncio.sleep(10)

    client.rooms.settings = settings.model_copy(update={"body_timeout_s": 0.05})
    response = await oai.http.post("completions", content=stalling())
    assert "0.05 seconds" in assert_error(response, 408)
    assert response.headers["connection"] == "close"


async def test_paths_and_methods_that_are_not_there(oai: Oai, client: Client) -> None:
    assert_error(await oai.http.post("embeddings", json={}), 404)
    assert_error(await oai.http.get("chat/completions"), 405)
    assert_error(await oai.http.get("http://hearth/oai/v1/models"), 404)
    assert_error(await oai.http.post("completions", content=b"x" * (2**20 + 1)), 413)
    gone = await client.get("http://hearth/oai-else")
    assert set(gone.json()) == {"detail", "category"}, "the Tinker API keeps its own errors"
