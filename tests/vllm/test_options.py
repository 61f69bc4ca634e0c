"""Everything that a sample request can ask for, against the embedded engine or peft."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import aclosing
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from backends.contract import Failure, SampleDelta, SampleResult
from backends.sampling.embedded import EmbeddedEngine
from backends.sampling.requests import CANCELLED, DIVERGED
from backends.sampling.vllm.engine import VllmEngine
from backends.workers.backlog import joined
from tests.tiny_models import EOS_TOKEN_ID, MAX_CONTEXT_LENGTH, VOCAB_SIZE
from tests.unit.sampling.material import logprobs, reference
from tests.unit.sampling.material import result as embedded_result
from tests.vllm.material import prompt, request, result

pytestmark = pytest.mark.asyncio(loop_scope="session")

T = 24
"""Tokens of the prompts here."""


def targets() -> np.ndarray:
    """int64[T - 1, 130]: more than vLLM takes in one call, and nothing asked at first."""
    chosen = np.random.default_rng(1).integers(-1, VOCAB_SIZE, (T - 1, 130))
    chosen[:5] = -1
    return chosen


GREEDY: dict[str, dict[str, Any]] = {
    "plain": {},
    "samples that are alike": {"num_samples": 3, "topk_sample_logprobs": 2},
    "prompt logprobs": {"prompt_logprobs": True},
    "prompt logprobs of several samples": {"prompt_logprobs": True, "num_samples": 2},
    "the last n": {"prompt_logprobs": True, "prompt_logprobs_last_n": 4, "topk_prompt_logprobs": 2},
    "the best prompt tokens": {"topk_prompt_logprobs": 5},
    "the best tokens": {"topk_sample_logprobs": 100},
    "chosen tokens": {"target_prompt_tokens": targets()},
    "nothing chosen": {"target_prompt_tokens": np.full((T - 1, 2), -1)},
    "greedy alternatives": {"prompt_alt_tokens_k": 3},
    "all scores": {
        "prompt_logprobs": True,
        "topk_prompt_logprobs": 3,
        "target_prompt_tokens": targets()[:, :4],
        "prompt_alt_tokens_k": 2,
    },
    "nothing to generate": {"max_tokens": 0, "prompt_logprobs": True, "num_samples": 2},
    "filters, which greedy ignores": {"top_k": 3, "top_p": 0.5},
}


@pytest.mark.parametrize("name", GREEDY)
async def test_a_greedy_request_gets_what_the_embedded_engine_gives(
    engine: VllmEngine, embedded: EmbeddedEngine, adapters: list[str], name: str
):
    one = request("r", prompt(T, seed=3), adapter=adapters[0], **GREEDY[name])
    same(await result(engine, one), embedded_result(embedded, one))


@pytest.mark.parametrize("length", [1, 2, MAX_CONTEXT_LENGTH - 1])
async def test_prompts_of_any_length_are_scored_alike(
    engine: VllmEngine, embedded: EmbeddedEngine, length: int
):
    fields = {"prompt_logprobs": True, "topk_prompt_logprobs": 2, "prompt_alt_tokens_k": 1}
    one = request("r", prompt(length, seed=9), max_tokens=3, **fields)
    same(await result(engine, one), embedded_result(embedded, one))


def same(got: SampleResult, expected: SampleResult) -> None:
    """All but the cache's hits."""
    for ours, theirs in zip(got.sequences, expected.sequences, strict=True):
        assert ours.tokens.tolist() == theirs.tokens.tolist()
        assert ours.stop_reason == theirs.stop_reason
        assert (ours.tokens.dtype, ours.logprobs.dtype) == (np.int32, np.float32)
        close(ours.logprobs, theirs.logprobs)
        same_topk(ours.topk, theirs.topk)
    for name in ("prompt_logprobs", "target_prompt_logprobs", "prompt_alt_logprobs"):
        close(getattr(got, name), getattr(expected, name))
    same_topk(got.topk_prompt_logprobs, expected.topk_prompt_logprobs)
    if expected.prompt_alt_tokens is None:
        assert got.prompt_alt_tokens is None
    else:
        assert got.prompt_alt_tokens.dtype == np.int64
        assert got.prompt_alt_tokens.tolist() == expected.prompt_alt_tokens.tolist()


def same_topk(got: Any, expected: Any) -> None:
    assert (got is None) == (expected is None)
    if got is not None:
        assert got.token_ids.tolist() == expected.token_ids.tolist()
        assert got.token_ids.dtype == np.int32
        close(got.logprobs, expected.logprobs)


def close(got: np.ndarray | None, expected: np.ndarray | None) -> None:
    assert (got is None) == (expected is None)
    if got is not None and expected is not None:
        assert (got.dtype, got.shape) == (np.float32, expected.shape)
        np.testing.assert_allclose(got, expected, atol=1e-3)


async def tokens_of(engine: VllmEngine, **fields: Any) -> list[list[int]]:
    fields = {"temperature": 1.0, "num_samples": 3} | fields
    got = await result(engine, request("r", prompt(6), **fields))
    return [s.tokens.tolist() for s in got.sequences]


async def test_a_seed_repeats_its_samples_and_shares_none_with_its_neighbour(engine: VllmEngine):
    first = await tokens_of(engine, seed=7)
    assert len({tuple(tokens) for tokens in first}) == 3
    assert await tokens_of(engine, seed=7) == first
    later = await tokens_of(engine, seed=8)
    assert not {tuple(t) for t in first} & {tuple(t) for t in later}
    assert await tokens_of(engine) != await tokens_of(engine)
    for extreme in (-1, 0, -(2**63), 2**63 - 1):
        assert await tokens_of(engine, seed=extreme) == await tokens_of(engine, seed=extreme)


async def test_more_samples_than_the_replica_takes_in_one_call(engine: VllmEngine):
    tokens = await tokens_of(engine, num_samples=40, seed=3, max_tokens=12)
    assert len({tuple(t) for t in tokens}) == 40


@pytest.fixture
def free_run(embedded: EmbeddedEngine) -> np.ndarray:
    """What the model says when nothing stops it."""
    return embedded_result(embedded, request("r", prompt(6), max_tokens=60)).sequences[0].tokens


async def test_generation_ends_with_the_stop_token_in_it(
    engine: VllmEngine, embedded: EmbeddedEngine, free_run: np.ndarray
):
    for limit in (60, int(np.flatnonzero(free_run == free_run[10])[0]) + 1):
        stop = (int(free_run[10]), 250)
        one = request("r", prompt(6), max_tokens=limit, stop_token_ids=stop)
        got = await result(engine, one)
        assert got.sequences[0].stop_reason == "stop"
        same(got, embedded_result(embedded, one))


async def test_generation_ends_with_the_token_that_completes_a_stop_string(
    engine: VllmEngine, embedded: EmbeddedEngine, free_run: np.ndarray
):
    """Each of the texts that the run holds, those beside broken characters included."""
    text = bytes(free_run.tolist()).decode(errors="replace")
    stops = [text[i : i + 2] for i in range(0, 50, 5)] + [text[40], "absent", "<eos>"]
    for stop in stops:
        one = request("r", prompt(6), max_tokens=60, stop_strings=("zzzzz", stop))
        same(await result(engine, one), embedded_result(embedded, one))


async def test_without_stops_not_even_the_end_token_ends_it(engine: VllmEngine):
    tokens = np.full(3, EOS_TOKEN_ID)
    got = await result(
        engine, request("r", tokens, temperature=2.0, seed=0, max_tokens=500, num_samples=4)
    )
    assert all(len(s.tokens) == 500 for s in got.sequences)
    assert any(EOS_TOKEN_ID in s.tokens for s in got.sequences)


async def test_alternatives_are_drawn_at_every_position(
    engine: VllmEngine, base_path: Path, adapters: list[str]
):
    tokens = prompt(4)
    fields = {"temperature": 0.7, "seed": 3, "prompt_alt_tokens_k": 600}
    one = request("r", tokens, adapter=adapters[0], max_tokens=1, **fields)
    got = await result(engine, one)
    rows = logprobs(reference(base_path, adapters[0]), tokens)[:-1]
    assert got.prompt_alt_tokens.shape == (3, 600)
    for row, drawn, own in zip(
        rows.numpy(), got.prompt_alt_tokens, got.prompt_alt_logprobs, strict=True
    ):
        np.testing.assert_allclose(own, row[drawn], atol=1e-3)
        weights = np.exp(row / 0.7)
        frequency = np.bincount(drawn, minlength=VOCAB_SIZE) / 600
        # Five standard deviations of the most uncertain token.
        assert np.abs(frequency - weights / weights.sum()).max() < 5 * 0.5 / np.sqrt(600)
    again = await result(engine, one)
    assert again.prompt_alt_tokens.tolist() == got.prompt_alt_tokens.tolist()


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"prompt": np.array([VOCAB_SIZE])}, "outside"),
    ({"num_samples": 0}, "num_samples"),
    ({"temperature": float("nan")}, "temperature"),
    ({"temperature": 3.0}, "at most 2"),
    ({"temperature": 0.001}, "0.01"),
    ({"topk_sample_logprobs": 200}, "201"),
    ({"prompt": np.zeros(MAX_CONTEXT_LENGTH, np.int64), "prompt_logprobs": True}, "room for one"),
]


@pytest.mark.parametrize(("fields", "word"), REFUSED)
async def test_what_vllm_cannot_do_is_refused_in_one_sentence(
    engine: VllmEngine, fields: dict[str, Any], word: str
):
    fields = {"prompt": prompt(5)} | fields
    failure = await engine.sample(request("bad", fields.pop("prompt"), **fields))
    assert isinstance(failure, Failure)
    assert failure.category == "user"
    assert word in failure.message


async def test_a_prompt_that_fills_the_context_leaves_room_for_nothing(engine: VllmEngine):
    got = await result(engine, request("r", prompt(MAX_CONTEXT_LENGTH), num_samples=2))
    assert [(len(s.tokens), s.stop_reason) for s in got.sequences] == [(0, "length")] * 2


async def test_an_adapter_that_cannot_be_loaded_fails_its_own_request(
    engine: VllmEngine, adapters: list[str], too_large: str, tmp_path: Path
):
    for folder in (str(tmp_path / "nowhere"), too_large):
        failure = await engine.sample(request("bad", prompt(5), adapter=folder))
        assert isinstance(failure, Failure)
        assert failure.category == "server"
        assert folder in failure.message
    await result(engine, request("good", prompt(5), adapter=adapters[0]))


@pytest.mark.parametrize(
    "fields", [{}, {"temperature": 1.0, "num_samples": 2}, {"prompt_logprobs": True}]
)
async def test_weights_that_diverged_fail_their_own_request_alone(
    engine: VllmEngine, adapters: list[str], diverged: str, fields: dict[str, Any]
):
    good = request("good", prompt(7), adapter=adapters[0], max_tokens=6)
    before = await result(engine, good)
    wild = request("wild", prompt(7), adapter=diverged, **fields)
    assert await engine.sample(wild) == DIVERGED
    after = await result(engine, good)
    assert after.sequences[0].tokens.tolist() == before.sequences[0].tokens.tolist()


STREAMED: dict[str, dict[str, Any]] = {
    "greedy": {"num_samples": 2, "topk_sample_logprobs": 2},
    "scored": {"prompt_logprobs": True, "target_prompt_tokens": targets()[:, :3]},
    "stopped": {"stop_strings": ("\ufffd",), "max_tokens": 60},
}


@pytest.mark.parametrize("name", STREAMED)
async def test_a_stream_is_the_result_in_pieces(
    engine: VllmEngine, embedded: EmbeddedEngine, adapters: list[str], name: str
):
    one = request("r", prompt(T, seed=3), adapter=adapters[2], **STREAMED[name])
    *deltas, last = [part async for part in engine.stream(one)]
    assert isinstance(last, SampleResult)
    same(last, embedded_result(embedded, one))
    for index, sequence in enumerate(last.sequences):
        whole = joined([d for d in deltas if isinstance(d, SampleDelta) and d.index == index])
        assert whole.tokens.tolist() == sequence.tokens.tolist()
        close(whole.logprobs, sequence.logprobs)
        same_topk(whole.topk, sequence.topk)


async def idle(engine: VllmEngine) -> AsyncIterator[int]:
    """How many requests the replica works on, asked again and again."""
    while True:
        yield (await engine.fleet.replicas[0].client.metrics()).running


async def test_a_cancelled_request_stops_in_the_replica_too(engine: VllmEngine):
    long = request("long", prompt(5), max_tokens=500, temperature=1.0, num_samples=8)
    running = asyncio.create_task(engine.sample(long))
    async for count in idle(engine):
        if count == 8:
            break
    await engine.cancel("unknown")
    await engine.cancel("long")
    assert await running == CANCELLED
    async for count in idle(engine):
        if count == 0:
            break


async def test_a_reader_that_leaves_a_stream_cancels_it(engine: VllmEngine):
    long = request("long", prompt(5), max_tokens=500, temperature=1.0)
    async with aclosing(engine.stream(long)) as stream:
        async for _ in stream:
            break
    async for count in idle(engine):
        if count == 0:
            break


async def test_a_paused_replica_freezes_what_runs_and_goes_on(
    engine: VllmEngine, embedded: EmbeddedEngine
):
    client = engine.fleet.replicas[0].client
    one = request("r", prompt(6), max_tokens=200)
    async with aclosing(engine.stream(one)) as stream:
        parts = [await anext(stream)]
        await client.pause("keep")
        await client.resume()
        parts += [part async for part in stream]
    assert isinstance(parts[-1], SampleResult)
    same(parts[-1], embedded_result(embedded, one))
