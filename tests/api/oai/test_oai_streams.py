"""Server-sent events, read while the engine writes."""

from __future__ import annotations

import json
from typing import Any

from backends.contract import Failure
from tests.api.client import Client
from tests.api.oai.client import MODEL, Oai
from tests.api.oai.writer import Reader, Writer
from tests.tiny_models import EOS_TOKEN_ID

CHAT = "/oai/api/v1/chat/completions"
COMPLETIONS = "/oai/api/v1/completions"


def chat(client: Client, **more: Any) -> Reader:
    messages = [{"role": "user", "content": "Hi"}]
    return Reader(client.app, CHAT, {"model": MODEL, "messages": messages, "stream": True, **more})


def complete(client: Client, **more: Any) -> Reader:
    return Reader(client.app, COMPLETIONS, {"model": MODEL, "prompt": "Hi", "stream": True, **more})


def events(text: str) -> list[Any]:
    lines = [line.removeprefix("data: ") for line in text.split("\n\n") if line]
    assert lines[-1] == "[DONE]"
    return [json.loads(line) for line in lines[:-1]]


async def test_each_token_arrives_before_the_next_is_made(client: Client, backend: Writer) -> None:
    backend.by_steps()
    reader = chat(client)
    backend.step()
    first = await reader.chunk()
    assert first["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    for letter in "Hello":
        assert (await reader.chunk())["choices"][0]["delta"] == {"content": letter}
        backend.step()
    last = await reader.chunk()
    assert last["choices"][0] == {
        "index": 0,
        "delta": {},
        "logprobs": None,
        "finish_reason": "stop",
    }
    assert await reader.event() == "[DONE]"
    await reader.task


async def test_usage_comes_last_when_asked_for(oai: Oai) -> None:
    response = await oai.chat(stream=True, stream_options={"include_usage": True})
    assert response.headers["content-type"].startswith("text/event-stream")
    *chunks, last = events(response.text)
    assert all(chunk["usage"] is None for chunk in chunks)
    assert last["choices"] == []
    assert last["usage"]["completion_tokens"] == 6
    assert last["usage"]["prompt_tokens_details"] == {"cached_tokens": 2}
    assert {chunk["id"] for chunk in chunks} == {last["id"]}
    assert "usage" not in events((await oai.chat(stream=True)).text)[0]


async def test_a_stream_says_what_the_whole_answer_says(oai: Oai, backend: Writer) -> None:
    backend.script = [*"Hé \u20ac".encode(), EOS_TOKEN_ID, *b"dropped"]
    settings = {"n": 2, "logprobs": 2, "stop": "zz"}
    whole = (await oai.complete(["a", "b"], **settings)).json()["choices"]
    chunks = events((await oai.complete(["a", "b"], stream=True, **settings)).text)
    for choice in whole:
        own = [c for chunk in chunks for c in chunk["choices"] if c["index"] == choice["index"]]
        assert "".join(one["text"] for one in own) == choice["text"]
        assert own[-1]["finish_reason"] == choice["finish_reason"]
        assert all(one["finish_reason"] is None for one in own[:-1])
        for name, values in choice["logprobs"].items():
            assert [v for one in own for v in one["logprobs"][name]] == values


async def test_what_may_become_a_stop_string_is_held_back(client: Client, backend: Writer) -> None:
    backend.script = [*b"a END b END"]
    backend.by_steps()
    reader = complete(client, stop=["END b"], echo=True)
    backend.step(7)
    texts = [(await reader.chunk())["choices"][0]["text"] for _ in range(2)]
    assert "".join(texts) == "Hia "[: len("".join(texts))]
    backend.step(10)
    rest = texts
    while (event := await reader.event()) != "[DONE]":
        rest.append(json.loads(event)["choices"][0]["text"])
    assert "".join(rest) == "Hia "
    await reader.task


async def test_a_reader_that_hangs_up_stops_the_generation(client: Client, backend: Writer) -> None:
    backend.by_steps()
    reader = complete(client)
    backend.step(2)
    assert (await reader.chunk())["choices"][0]["text"] == "H"
    assert client.rooms.samplers._waiting["local"] == 1
    await reader.hang_up()
    assert backend.cancelled == [backend.sampled[0].request_id]
    assert client.rooms.samplers._waiting["local"] == 0
    await client.rooms.oai.bills.settle()
    assert await _sampled_tokens(client) == 2, "what was generated is charged"


async def test_hanging_up_before_the_first_token_or_without_a_stream(
    client: Client, backend: Writer
) -> None:
    backend.by_steps()
    for stream in (True, False):
        reader = complete(client, stream=stream)
        await backend.asked(1)
        await reader.hang_up()
        assert backend.cancelled == [backend.sampled.pop().request_id]
        backend.cancelled.clear()
        assert client.rooms.samplers._waiting["local"] == 0
    await client.rooms.oai.bills.settle()
    assert await _sampled_tokens(client) == 0


async def test_what_goes_wrong_on_the_way_is_the_last_event(
    client: Client, backend: Writer
) -> None:
    backend.fail_with = Failure(message="broken", category="server")
    reader = complete(client)
    got = [await reader.event() for _ in range(6)]
    await reader.task
    assert json.loads(got[-1]) == {
        "error": {"message": "broken", "type": "server_error", "param": None, "code": None}
    }


async def test_prompts_of_one_call_are_written_side_by_side(
    client: Client, backend: Writer
) -> None:
    backend.by_steps()
    reader = complete(client, prompt=["a", "b"])
    backend.step(2)
    seen = {(await reader.chunk())["choices"][0]["index"] for _ in range(2)}
    assert seen == {0, 1}
    backend.step(100)
    while await reader.event() != "[DONE]":
        pass
    await reader.task


async def _sampled_tokens(client: Client) -> int:
    window = {"starting_on": "1970-01-12T00:00:00Z", "ending_before": "1970-01-13T00:00:00Z"}
    found = (await client.get("billing/usage/events", params=window)).json()["data"]
    return sum(
        one["event_info"]["token_count"]
        for one in found
        if one["event_info"]["type"] == "sampling_sample"
    )
