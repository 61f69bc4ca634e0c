"""What OpenAI's clients get: whole answers of both dialects."""

from __future__ import annotations

import pytest

from tests.api.client import Client
from tests.api.oai.client import MODEL, Oai
from tests.api.oai.writer import Writer
from tests.tiny_models import EOS_TOKEN_ID


async def test_a_chat(oai: Oai, backend: Writer) -> None:
    messages = [
        {"role": "developer", "content": "Be brief."},
        {"role": "user", "content": [{"type": "text", "text": "H"}, {"type": "text", "text": "i"}]},
    ]
    body = {"model": MODEL, "messages": messages, "user": "me", "store": False, "unknown": 1}
    answer = (await oai.http.post("chat/completions", json=body)).json()
    assert answer["id"].startswith("chatcmpl-")
    assert (answer["object"], answer["model"]) == ("chat.completion", MODEL)
    assert answer["choices"] == [
        {
            "index": 0,
            "message": {"role": "assistant", "content": "Hello", "refusal": None},
            "logprobs": None,
            "finish_reason": "stop",
        }
    ]
    prompt = b"s:Be brief.\nu:Hi\na:"
    assert bytes(backend.sampled[0].prompt.tolist()) == prompt
    assert answer["usage"] == {
        "prompt_tokens": len(prompt),
        "completion_tokens": 6,
        "total_tokens": len(prompt) + 6,
        "prompt_tokens_details": {"cached_tokens": 2},
    }


async def test_what_the_engine_is_asked(oai: Oai, backend: Writer) -> None:
    await oai.chat(
        max_tokens=9,
        max_completion_tokens=7,
        temperature=0,
        top_p=0.5,
        top_k=4,
        n=2,
        seed=-1,
        stop=["x", "yz"],
        logprobs=True,
        top_logprobs=3,
    )
    (asked,) = backend.sampled
    assert (asked.max_tokens, asked.temperature, asked.top_p, asked.top_k) == (7, 0, 0.5, 4)
    assert (asked.num_samples, asked.seed, asked.stop_strings) == (2, 2**63 - 1, ("x", "yz"))
    assert asked.stop_token_ids == (EOS_TOKEN_ID,), "a stop string does not replace EOS here"
    assert asked.topk_sample_logprobs == 3
    await oai.chat(top_k=0)
    assert backend.sampled[1].top_k == -1
    assert backend.sampled[1].max_tokens == 128 - len(backend.sampled[1].prompt)
    await oai.complete("Hi")
    assert backend.sampled[2].max_tokens == 16


@pytest.mark.parametrize(
    ("prompt", "sent"),
    [
        ("Hi", [b"Hi"]),
        (["Hi", "you"], [b"Hi", b"you"]),
        ([72, 105], [b"Hi"]),
        ([[72, 105], [72]], [b"Hi", b"H"]),
    ],
)
async def test_the_four_forms_of_a_prompt(
    oai: Oai, backend: Writer, prompt: object, sent: list[bytes]
) -> None:
    answer = (await oai.complete(prompt, n=2)).json()
    assert sorted(bytes(one.prompt.tolist()) for one in backend.sampled) == sorted(sent)
    assert answer["object"] == "text_completion"
    assert [one["index"] for one in answer["choices"]] == list(range(2 * len(sent)))
    assert {one["text"] for one in answer["choices"]} == {"Hello"}
    assert answer["usage"]["prompt_tokens"] == sum(map(len, sent))
    assert answer["usage"]["completion_tokens"] == 12 * len(sent)


async def test_the_end_is_at_a_stop_string_or_at_the_limit(oai: Oai, backend: Writer) -> None:
    choice = (await oai.complete(stop="ll")).json()["choices"][0]
    assert (choice["text"], choice["finish_reason"]) == ("He", "stop")
    choice = (await oai.complete(max_tokens=3)).json()["choices"][0]
    assert (choice["text"], choice["finish_reason"]) == ("Hel", "length")
    backend.script = list("a\u20acb".encode())
    choice = (await oai.complete(max_tokens=3)).json()["choices"][0]
    assert choice["text"] == "a\ufffd"


async def test_logprobs_of_a_chat(oai: Oai, backend: Writer) -> None:
    backend.script = [65, 0xC3, 0xA9, EOS_TOKEN_ID]
    answer = (await oai.chat(logprobs=True, top_logprobs=2)).json()["choices"][0]
    assert answer["message"]["content"] == "A\u00e9"
    top = [
        {"token": "A", "logprob": 0.0, "bytes": [65]},
        {"token": "B", "logprob": -1.0, "bytes": [66]},
    ]
    assert answer["logprobs"] == {
        "content": [
            {"token": "A", "logprob": 0.0, "bytes": [65], "top_logprobs": top},
            {"token": "bytes:\\xc3", "logprob": -1.0, "bytes": [0xC3], "top_logprobs": top},
            {"token": "bytes:\\xa9", "logprob": -2.0, "bytes": [0xA9], "top_logprobs": top},
        ],
        "refusal": None,
    }
    assert (await oai.chat(logprobs=True)).json()["choices"][0]["logprobs"]["content"][0][
        "top_logprobs"
    ] == []


async def test_logprobs_and_echo_of_a_completion(oai: Oai, backend: Writer) -> None:
    backend.script = [*b"BC", EOS_TOKEN_ID]
    choice = (await oai.complete("xyz", logprobs=1, echo=True)).json()["choices"][0]
    assert choice["text"] == "xyzBC"
    assert choice["logprobs"] == {
        "tokens": ["x", "y", "z", "B", "C"],
        "token_logprobs": [None, -1.0, -2.0, 0.0, -1.0],
        "top_logprobs": [
            None,
            {"A": 0.0, "y": -1.0},
            {"A": 0.0, "z": -2.0},
            {"A": 0.0, "B": 0.0},
            {"A": 0.0, "C": -1.0},
        ],
        "text_offset": [0, 1, 2, 3, 4],
    }
    choice = (await oai.complete([120], echo=True)).json()["choices"][0]
    assert (choice["text"], choice["logprobs"]) == ("xBC", None)


async def test_a_prompt_can_be_scored_without_generating(oai: Oai, backend: Writer) -> None:
    """As evaluation harnesses do."""
    answer = (await oai.complete("xyz", logprobs=1, echo=True, max_tokens=0)).json()
    (choice,) = answer["choices"]
    assert backend.sampled[0].max_tokens == 0
    assert (choice["text"], choice["finish_reason"]) == ("xyz", "length")
    assert choice["logprobs"]["token_logprobs"] == [None, -1.0, -2.0]
    assert answer["usage"]["completion_tokens"] == 0


async def test_models(oai: Oai, client: Client) -> None:
    run = await client.run()
    path = await client.saved_for_sampler(run, 1, "mine")
    await client.saved(run, 2, "not-to-sample-from")
    listed = (await oai.http.get("models")).json()
    assert listed["object"] == "list"
    assert [one["id"] for one in listed["data"]] == [MODEL, path]
    for one in listed["data"]:
        assert one["object"] == "model"
        assert (await oai.http.get(f"models/{one['id']}")).json() == one
        quoted = one["id"].replace("/", "%2F").replace(":", "%3A")
        assert (await oai.http.get(f"models/{quoted}")).json() == one


async def test_an_adapter_is_a_model(oai: Oai, client: Client, backend: Writer) -> None:
    path = await client.saved_for_sampler(await client.run(), 1, "mine")
    answer = (await oai.complete(model=path)).json()
    assert answer["model"] == path
    adapter = backend.sampled[0].adapter
    assert adapter is not None
    checkpoint = await client.rooms.oai.models.named(
        await client.rooms.keys.authenticate(None), path
    )
    assert adapter.endswith(checkpoint.checkpoint.folder)


async def test_usage_is_counted(oai: Oai, client: Client) -> None:
    await oai.chat()
    await oai.complete(["Hi", "you"])
    await client.rooms.oai.bills.settle()
    window = {"starting_on": "1970-01-12T00:00:00Z", "ending_before": "1970-01-13T00:00:00Z"}
    found = (await client.get("billing/usage/events", params=window)).json()["data"]
    counts = {
        (one["event_info"]["type"], one["event_info"].get("cached")): one["event_info"]
        for one in found
    }
    assert counts["sampling_sample", None]["token_count"] == 18
    assert counts["sampling_prefill", True]["token_count"] == 6
    assert counts["sampling_prefill", False]["token_count"] == len(b"u:Hi\na:") + 5 - 6
    assert {one["base_model"] for one in found} == {MODEL}
