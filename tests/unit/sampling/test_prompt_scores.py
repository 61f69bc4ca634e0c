from __future__ import annotations

import numpy as np
import pytest
import torch

from tests.tiny_models import VOCAB_SIZE
from tests.unit.sampling.material import (
    MakeEngine,
    logprobs,
    prompt,
    reference,
    request,
    result,
)

LENGTH = 50


@pytest.fixture(params=[None, 0, 1])
def adapter(request: pytest.FixtureRequest, adapters: tuple[str, str]) -> str | None:
    return None if request.param is None else adapters[request.param]


@pytest.mark.parametrize("chunk", [7, 256])
def test_prompt_scores_are_those_of_transformers(
    make_engine: MakeEngine, base_path, adapter, chunk
):
    tokens = prompt(LENGTH)
    got = result(
        make_engine(prefill_chunk_tokens=chunk),
        request(
            "r",
            tokens,
            adapter=adapter,
            max_tokens=1,
            prompt_logprobs=True,
            topk_prompt_logprobs=5,
        ),
    )
    rows = logprobs(reference(base_path, adapter), tokens)[:-1]
    own = rows.gather(1, torch.from_numpy(tokens[1:])[:, None])[:, 0]
    assert np.isnan(got.prompt_logprobs[0])
    np.testing.assert_allclose(got.prompt_logprobs[1:], own.numpy(), atol=1e-4)
    assert got.prompt_logprobs.dtype == np.float32
    best = rows.topk(5)
    np.testing.assert_allclose(
        got.topk_prompt_logprobs.logprobs[1:], best.values.numpy(), atol=1e-4
    )
    assert got.topk_prompt_logprobs.token_ids[1:].tolist() == best.indices.tolist()
    assert got.topk_prompt_logprobs.token_ids[0].tolist() == [0] * 5
    assert got.topk_prompt_logprobs.logprobs[0].tolist() == [-99999.0] * 5


def test_only_the_last_n_are_scored_and_the_rest_may_come_from_the_cache(make_engine, base_path):
    tokens = prompt(LENGTH)
    engine = make_engine()
    result(engine, request("first", tokens))
    tail = request(
        "r", tokens, prompt_logprobs=True, prompt_logprobs_last_n=4, topk_prompt_logprobs=2
    )
    got = result(engine, tail)
    rows = logprobs(reference(base_path, None), tokens)[:-1]
    own = rows.gather(1, torch.from_numpy(tokens[1:])[:, None])[:, 0]
    assert np.isnan(got.prompt_logprobs[:-4]).all()
    np.testing.assert_allclose(got.prompt_logprobs[-4:], own[-4:].numpy(), atol=1e-4)
    assert (got.topk_prompt_logprobs.logprobs[:-4] == -99999.0).all()
    assert got.topk_prompt_logprobs.token_ids[-4:].tolist() == rows.topk(2).indices[-4:].tolist()
    # Position T - 4 is scored after token T - 5, which is therefore computed again.
    assert got.prompt_cache_hit_tokens == LENGTH - 5


def test_a_whole_score_reuses_nothing(make_engine: MakeEngine):
    tokens = prompt(LENGTH)
    engine = make_engine()
    result(engine, request("first", tokens))
    got = result(engine, request("r", tokens, prompt_logprobs=True))
    assert got.prompt_cache_hit_tokens == 0
    assert not np.isnan(got.prompt_logprobs[1:]).any()


def test_other_tokens_are_scored_in_place_of_the_prompts(make_engine, base_path, adapter):
    tokens = prompt(LENGTH)
    targets = np.random.default_rng(1).integers(0, VOCAB_SIZE, (LENGTH - 1, 3))
    targets[:20] = -1
    targets[30, 1] = -1
    engine = make_engine(prefill_chunk_tokens=16)
    result(engine, request("first", tokens, adapter=adapter))
    got = result(engine, request("r", tokens, adapter=adapter, target_prompt_tokens=targets))
    rows = logprobs(reference(base_path, adapter), tokens)[:-1]
    expected = rows.gather(1, torch.from_numpy(targets).clamp(min=0)).numpy()
    expected[targets < 0] = 0.0
    np.testing.assert_allclose(got.target_prompt_logprobs, expected, atol=1e-4)
    assert got.prompt_cache_hit_tokens == 20
    assert got.prompt_logprobs is None


def test_alternatives_are_drawn_at_every_position(make_engine: MakeEngine, base_path):
    tokens = prompt(4)
    fields = {"temperature": 0.7, "seed": 3, "prompt_alt_tokens_k": 4000}
    got = result(make_engine(), request("r", tokens, **fields))
    rows = logprobs(reference(base_path, None), tokens)[:-1]
    assert got.prompt_alt_tokens.shape == (3, 4000)
    assert got.prompt_alt_tokens.dtype == np.int64
    own = rows.gather(1, torch.from_numpy(got.prompt_alt_tokens)).numpy()
    np.testing.assert_allclose(got.prompt_alt_logprobs, own, atol=1e-4)
    for row, drawn in zip((rows / 0.7).softmax(-1), got.prompt_alt_tokens, strict=True):
        frequency = np.bincount(drawn, minlength=VOCAB_SIZE) / 4000
        assert np.abs(frequency - row.numpy()).max() < 0.04
    again = result(make_engine(prefill_chunk_tokens=1), request("r", tokens, **fields))
    assert again.prompt_alt_tokens.tolist() == got.prompt_alt_tokens.tolist()


def test_greedy_alternatives_are_the_best_token(make_engine: MakeEngine, base_path):
    tokens = prompt(9)
    got = result(make_engine(), request("r", tokens, prompt_alt_tokens_k=2))
    best = logprobs(reference(base_path, None), tokens)[:-1].argmax(-1).tolist()
    assert got.prompt_alt_tokens.tolist() == [[token, token] for token in best]


def test_a_prompt_of_one_token_has_nothing_to_score(make_engine: MakeEngine):
    fields = {"prompt_logprobs": True, "topk_prompt_logprobs": 1, "prompt_alt_tokens_k": 1}
    got = result(make_engine(), request("r", prompt(1), **fields))
    assert np.isnan(got.prompt_logprobs).tolist() == [True]
    assert got.topk_prompt_logprobs.logprobs.tolist() == [[-99999.0]]
    assert got.prompt_alt_tokens.shape == (0, 1)
