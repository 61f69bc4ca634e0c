"""OpenAI's own client against `/oai/api/v1`, beside Tinker's on the same weights."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import AsyncIterator, Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path

import openai
import pytest
import pytest_asyncio
import tinker
from openai.types.chat import ChatCompletionChunk, ChatCompletionMessageParam
from tinker import types
from transformers import PreTrainedTokenizerFast

from tests.e2e.client import Raw, fresh, generate, prompt, train, wait
from tests.e2e.speech import MARK, with_words
from tests.running_server import RunningServer
from tests.tiny_models import EOS_TOKEN_ID, tiny_llama, with_tokenizer

TALKER = "tiny/talker"
MUTE = "tiny/mute"
TEMPLATE = (
    "{%- for m in messages %}<|eot|>{{ m.role }}: {{ m.content | trim }}\n{% endfor %}"
    "{%- if add_generation_prompt %}<|eot|>assistant: {% endif %}"
)
QUESTION: list[ChatCompletionMessageParam] = [
    {"role": "system", "content": "Sing."},
    {"role": "user", "content": " What is\ta lärk? "},
]
LONG = 400


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = with_words(with_tokenizer(tiny_llama(tmp_path_factory.mktemp("talker") / "llama")))
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    return folder


@pytest.fixture(scope="module")
def server(
    tmp_path_factory: pytest.TempPathFactory, folder: Path, model_path: Path
) -> Iterator[RunningServer]:
    data = tmp_path_factory.mktemp("openai") / "data"
    running = RunningServer(data, {TALKER: folder, MUTE: model_path})
    for name in ("alice", "bob", "carol"):
        running.create_key(name)
    running.start()
    yield running
    running.kill()


def client_of(server: RunningServer, tenant: str) -> openai.OpenAI:
    return openai.OpenAI(
        base_url=f"{server.url}/oai/api/v1", api_key=server.keys[tenant], max_retries=0
    )


@pytest.fixture(scope="module")
def alice(server: RunningServer) -> Iterator[openai.OpenAI]:
    with client_of(server, "alice") as client:
        yield client


@pytest.fixture(scope="module")
def bob(server: RunningServer) -> Iterator[openai.OpenAI]:
    with client_of(server, "bob") as client:
        yield client


@pytest_asyncio.fixture
async def async_alice(server: RunningServer) -> AsyncIterator[openai.AsyncOpenAI]:
    url = f"{server.url}/oai/api/v1"
    async with openai.AsyncOpenAI(base_url=url, api_key=server.keys["alice"]) as client:
        yield client


@pytest.fixture(scope="module")
def tokenizer(folder: Path) -> PreTrainedTokenizerFast:
    return PreTrainedTokenizerFast.from_pretrained(folder)


@pytest.fixture(scope="module")
def service(server: RunningServer) -> tinker.ServiceClient:
    return tinker.ServiceClient(base_url=server.url, api_key=server.keys["alice"])


@pytest.fixture(scope="module")
def adapter(service: tinker.ServiceClient) -> str:
    run = wait(service.create_lora_training_client(TALKER, rank=8, seed=5))
    train(run, 4)
    return wait(run.save_weights_for_sampler(fresh("for-openai"))).path


def text_of(tokenizer: PreTrainedTokenizerFast, tokens: list[int]) -> str:
    return tokenizer.decode(tokens, skip_special_tokens=True)


def chat_tokens(tokenizer: PreTrainedTokenizerFast) -> list[int]:
    return list(
        tokenizer.apply_chat_template(
            [dict(message) for message in QUESTION],
            add_generation_prompt=True,
            return_dict=False,
        )
    )


@pytest.mark.parametrize("tuned", [False, True])
def test_a_greedy_chat_is_what_tinker_samples(
    alice: openai.OpenAI,
    service: tinker.ServiceClient,
    tokenizer: PreTrainedTokenizerFast,
    adapter: str,
    tuned: bool,
) -> None:
    what = {"model_path": adapter} if tuned else {"base_model": TALKER}
    sampler = wait(service.create_sampling_client(**what))
    tokens = chat_tokens(tokenizer)
    expected = generate(sampler, tokens, 40, temperature=0.0)
    model = adapter if tuned else TALKER
    answer = alice.chat.completions.create(
        model=model, messages=QUESTION, temperature=0, max_tokens=40, logprobs=True, top_logprobs=3
    )
    (choice,) = answer.choices
    assert choice.message.content == text_of(tokenizer, expected.tokens)
    assert choice.finish_reason == expected.stop_reason
    assert answer.usage is not None
    assert answer.usage.prompt_tokens == len(tokens)
    assert answer.usage.completion_tokens == len(expected.tokens)
    assert answer.usage.prompt_tokens_details is not None
    assert answer.usage.prompt_tokens_details.cached_tokens is not None
    assert choice.logprobs is not None
    assert choice.logprobs.content is not None
    assert expected.logprobs is not None
    told = [one.logprob for one in choice.logprobs.content]
    assert told == pytest.approx(expected.logprobs[: len(told)], abs=1e-4)
    assert all(len(one.top_logprobs) == 3 for one in choice.logprobs.content)


def test_a_seeded_stream_is_the_seeded_answer(
    alice: openai.OpenAI, tokenizer: PreTrainedTokenizerFast
) -> None:
    def chunks() -> list[ChatCompletionChunk]:
        stream = alice.chat.completions.create(
            model=TALKER,
            messages=QUESTION,
            n=3,
            seed=11,
            max_tokens=60,
            stream=True,
            stream_options={"include_usage": True},
        )
        return list(stream)

    whole = alice.chat.completions.create(
        model=TALKER, messages=QUESTION, n=3, seed=11, max_tokens=60
    )
    got = chunks()
    texts = {one.index: "" for one in whole.choices}
    reasons = {}
    for chunk in got:
        for choice in chunk.choices:
            texts[choice.index] += choice.delta.content or ""
            reasons[choice.index] = choice.finish_reason or reasons.get(choice.index)
    assert texts == {one.index: one.message.content for one in whole.choices}
    assert reasons == {one.index: one.finish_reason for one in whole.choices}
    assert got[-1].usage is not None
    assert whole.usage is not None
    assert got[-1].usage.completion_tokens == whole.usage.completion_tokens


def test_the_first_chunk_arrives_well_before_the_last(alice: openai.OpenAI) -> None:
    """The sample that goes on longest takes a few hundred steps of the model."""
    began = time.monotonic()
    stream = alice.chat.completions.create(
        model=TALKER, messages=QUESTION, n=8, max_tokens=LONG, stream=True
    )
    arrivals = [time.monotonic() - began for chunk in stream if chunk.choices[0].delta.content]
    assert len(arrivals) > 100
    assert arrivals[0] < 0.3 * arrivals[-1]
    middle = arrivals[len(arrivals) // 2]
    assert 0.05 * arrivals[-1] < middle < 0.95 * arrivals[-1], "not all at once"


async def test_many_streams_at_once(async_alice: openai.AsyncOpenAI) -> None:
    """Each gets what it gets alone, and they are written side by side."""
    order: list[int] = []

    async def read(number: int) -> str:
        stream = await async_alice.completions.create(
            model=TALKER, prompt="la la", seed=number, max_tokens=80, stream=True
        )
        text = ""
        async for chunk in stream:
            text += chunk.choices[0].text
            order.append(number)
        return text

    alone = [await read(number) for number in range(4)]
    order.clear()
    assert await asyncio.gather(*map(read, range(4))) == alone
    assert order != sorted(order)


def test_hanging_up_stops_the_generation(server: RunningServer) -> None:
    """Carol pays for what was generated until she left, which is far from all."""
    raw = Raw(server.url, server.keys["carol"])
    with client_of(server, "carol") as carol:
        stream = carol.completions.create(
            model=TALKER, prompt="la", n=32, max_tokens=LONG, stream=True
        )
        for number, _ in enumerate(stream):
            if number == 40:
                break
        stream.close()
        deadline = time.monotonic() + 20
        while not (charged := _charged(raw)) and time.monotonic() < deadline:
            time.sleep(0.05)
        assert 32 < charged < 32 * LONG / 4
        began = time.monotonic()
        carol.completions.create(model=TALKER, prompt="la", max_tokens=1)
        assert time.monotonic() - began < 5, "nothing is in the way"


def _charged(raw: Raw) -> int:
    now = datetime.now(UTC).replace(minute=0, second=0, microsecond=0)
    window = {
        "starting_on": (now - timedelta(hours=1)).isoformat(),
        "ending_before": (now + timedelta(hours=1)).isoformat(),
    }
    found = raw.get("billing/usage/events", params=window).json()["data"]
    return sum(
        one["event_info"]["token_count"]
        for one in found
        if one["event_info"]["type"] == "sampling_sample"
    )


def test_stop_strings_are_cut_off_here_and_kept_by_tinker(
    alice: openai.OpenAI, service: tinker.ServiceClient, tokenizer: PreTrainedTokenizerFast
) -> None:
    tokens = tokenizer.encode("la la")
    sampler = wait(service.create_sampling_client(base_model=TALKER))
    free = text_of(tokenizer, generate(sampler, tokens, 60, temperature=0.0).tokens)
    stop = free[5:8]
    params = types.SamplingParams(max_tokens=60, temperature=0.0, stop=[stop])
    kept = wait(sampler.sample(prompt(tokens), 1, params)).sequences[0]
    assert stop in tokenizer.decode(kept.tokens)
    for stream in (False, True):
        answer = alice.completions.create(
            model=TALKER, prompt="la la", temperature=0, max_tokens=60, stop=stop, stream=stream
        )
        chunks = answer if stream else [answer]
        choices = [chunk.choices[0] for chunk in chunks]
        assert "".join(one.text for one in choices) == free[: free.index(stop)]
        assert choices[-1].finish_reason == "stop"


def test_scoring_a_prompt(
    alice: openai.OpenAI, service: tinker.ServiceClient, tokenizer: PreTrainedTokenizerFast
) -> None:
    tokens = tokenizer.encode("score this")
    sampler = wait(service.create_sampling_client(base_model=TALKER))
    expected = wait(sampler.compute_logprobs(prompt(tokens)))
    answer = alice.completions.create(
        model=TALKER, prompt="score this", echo=True, logprobs=2, max_tokens=0
    )
    (choice,) = answer.choices
    assert choice.text == "score this"
    assert choice.logprobs is not None
    assert choice.logprobs.token_logprobs is not None
    assert choice.logprobs.token_logprobs[0] is None
    assert choice.logprobs.token_logprobs[1:] == pytest.approx(expected[1:], abs=1e-4)
    assert choice.logprobs.tokens == list("score this")
    assert choice.logprobs.text_offset == list(range(10))


def test_token_ids_and_several_prompts(alice: openai.OpenAI) -> None:
    one = alice.completions.create(model=TALKER, prompt="la", temperature=0, max_tokens=8)
    two = alice.completions.create(
        model=TALKER, prompt=[[108, 97], [108]], temperature=0, max_tokens=8
    )
    assert two.choices[0].text == one.choices[0].text
    assert [choice.index for choice in two.choices] == [0, 1]


def test_special_tokens_are_no_text(alice: openai.OpenAI, adapter: str) -> None:
    assert MARK != EOS_TOKEN_ID
    answer = alice.completions.create(model=adapter, prompt="la", n=16, max_tokens=100)
    assert all("<|eot|>" not in one.text and "<eos>" not in one.text for one in answer.choices)


def test_the_models(alice: openai.OpenAI, bob: openai.OpenAI, adapter: str) -> None:
    assert {TALKER, MUTE, adapter} <= {model.id for model in alice.models.list()}
    assert adapter not in {model.id for model in bob.models.list()}
    assert alice.models.retrieve(adapter).id == adapter
    with pytest.raises(openai.NotFoundError):
        bob.models.retrieve(adapter)


def test_another_tenants_checkpoint_until_it_is_published(
    server: RunningServer, bob: openai.OpenAI, adapter: str
) -> None:
    with pytest.raises(openai.NotFoundError) as caught:
        bob.chat.completions.create(model=adapter, messages=QUESTION)
    assert caught.value.code == "model_not_found"
    rest = tinker.RestClient(base_url=server.url, api_key=server.keys["alice"])
    wait(rest.publish_checkpoint_from_tinker_path(adapter))
    answer = bob.chat.completions.create(model=adapter, messages=QUESTION, max_tokens=2)
    assert answer.choices[0].message.role == "assistant"
    wait(rest.unpublish_checkpoint_from_tinker_path(adapter))


def test_errors_are_those_of_the_client(server: RunningServer, alice: openai.OpenAI) -> None:
    url = f"{server.url}/oai/api/v1"
    with (
        openai.OpenAI(base_url=url, api_key="tml-wrong") as stranger,
        pytest.raises(openai.AuthenticationError),
    ):
        stranger.chat.completions.create(model=TALKER, messages=QUESTION)
    with pytest.raises(openai.NotFoundError):
        alice.chat.completions.create(model="gpt-5", messages=QUESTION)
    with pytest.raises(openai.BadRequestError) as caught:
        alice.chat.completions.create(model=TALKER, messages=QUESTION, temperature=9)
    assert caught.value.param == "temperature"
    with pytest.raises(openai.BadRequestError, match="text only"):
        alice.chat.completions.create(
            model=TALKER,
            messages=[
                {
                    "role": "user",
                    "content": [{"type": "image_url", "image_url": {"url": "data:,"}}],
                }
            ],
        )
    with pytest.raises(openai.BadRequestError, match="has no chat template"):
        alice.chat.completions.create(model=MUTE, messages=QUESTION)
    assert alice.completions.create(model=MUTE, prompt="la", max_tokens=2).choices
    with pytest.raises(openai.BadRequestError) as caught:
        alice.completions.create(model=TALKER, prompt="x" * 512, stream=True)
    assert caught.value.code == "context_length_exceeded"


def test_a_worker_that_dies_in_the_middle_ends_the_stream_with_an_error(
    server: RunningServer, alice: openai.OpenAI
) -> None:
    """And the next call is answered by another one."""
    before = set(server.worker_pids())
    stream = alice.completions.create(model=TALKER, prompt="la", n=32, max_tokens=LONG, stream=True)
    next(iter(stream))
    _kill(before)
    with pytest.raises(openai.APIError, match="engine failed"):
        list(stream)
    answer = alice.completions.create(model=TALKER, prompt="la", max_tokens=2, timeout=120)
    assert answer.choices[0].text is not None


def _kill(pids: set[int]) -> None:
    for pid in pids:
        os.kill(pid, signal.SIGKILL)
