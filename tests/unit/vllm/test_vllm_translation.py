"""What vLLM is asked. What it answers to it is in tests/vllm."""

from __future__ import annotations

from itertools import combinations, pairwise
from typing import Any

import numpy as np
import pytest

from backends.contract import SampleRequest
from backends.sampling.vllm.translate import Limits, derived_seed, generations, scorings

LIMITS = Limits(max_num_seqs=16, max_logprobs=100)


class Bytes:
    """Token i is byte i."""

    def decode(self, token_ids, *, skip_special_tokens, clean_up_tokenization_spaces):
        return bytes(token_ids).decode(errors="replace")


def request(**fields: Any) -> SampleRequest:
    fields = {"num_samples": 1, "max_tokens": 8, "prompt": np.arange(5)} | fields
    return SampleRequest(request_id="r", **fields)


def bodies(**fields: Any) -> list[dict[str, Any]]:
    one = request(**fields)
    return [g.body for g in generations(one, "name", 8, one.seed, LIMITS, Bytes())]


def salt(**fields: Any) -> str:
    return bodies(**fields)[0]["cache_salt"]


def test_samples_are_spread_over_calls_that_vllm_takes():
    one = request(num_samples=40, seed=1)
    calls = generations(one, "name", 8, 1, LIMITS, Bytes())
    assert [len(c.samples) for c in calls] == [16, 16, 8]
    assert [i for c in calls for (i,) in c.samples] == list(range(40))
    assert len({c.body["sampling_params"]["seed"] for c in calls}) == 3


def test_greedy_samples_are_generated_once():
    one = request(num_samples=40, temperature=0.0)
    (only,) = generations(one, "name", 8, None, LIMITS, Bytes())
    assert only.samples == (tuple(range(40)),)
    assert only.body["sampling_params"]["n"] == 1


def test_text_is_only_made_where_a_stop_string_is_looked_for():
    (plain,) = bodies()
    assert plain["sampling_params"]["detokenize"] is False
    assert "stop" not in plain["sampling_params"]
    (stopped,) = bodies(stop_strings=("", "a"))
    assert stopped["sampling_params"]["stop"] == ["a"]
    assert stopped["sampling_params"]["skip_special_tokens"] is False


@pytest.mark.parametrize("text", ["a", "a€", "a€€" * 20])
def test_stop_strings_are_sent_behind_whole_characters(text: str):
    prompt = np.array(list(text.encode()))
    (body,) = bodies(prompt=prompt, stop_strings=("a",))
    assert "stop" in body["sampling_params"]


@pytest.mark.parametrize("missing", [1, 2])
def test_stop_strings_are_not_sent_where_vllm_would_find_them_in_the_prompt(missing: int):
    prompt = np.array(list("a€".encode())[:-missing])
    (body,) = bodies(prompt=prompt, stop_strings=("a",))
    assert "stop" not in body["sampling_params"]
    assert body["sampling_params"]["detokenize"] is False


def test_caches_are_kept_apart_by_adapter_and_by_namespace():
    names = ["", "a", "b", "ab"]
    salts = {
        salt(adapter=adapter or None, cache_namespace=space) for adapter in names for space in names
    }
    assert len(salts) == 16
    assert salt(adapter="a", seed=3) == salt(adapter="a")


@pytest.mark.parametrize("seeds", [range(2000), range(-5, 0), [2**63, 2**64 - 1, 10**30]])
def test_samples_of_different_seeds_never_share_vllms_seeds(seeds):
    """vLLM adds 0 to 1023 to the seed of a call, and torch takes a signed 64-bit number."""
    derived = sorted(derived_seed(seed, "samples:0") for seed in seeds)
    assert all(0 <= seed < 2**63 - 1024 for seed in derived)
    assert all(later - earlier >= 1024 for earlier, later in pairwise(derived))


def test_different_purposes_have_different_seeds():
    purposes = ["samples:0", "samples:16", "alternatives:0:0", "alternatives:1:0"]
    for a, b in combinations(purposes, 2):
        assert derived_seed(1, a) != derived_seed(1, b)


def test_chosen_tokens_are_asked_for_from_the_first_row_on_and_in_columns():
    targets = np.full((4, 150), -1)
    targets[2, 140] = 7
    own, more = scorings(request(target_prompt_tokens=targets, prompt_logprobs=True), 100)
    assert own.params["prompt_logprobs"] == 0
    assert "prompt_logprobs" not in more.params
    assert own.params["prompt_logprob_start"] == more.params["prompt_logprob_start"] == 2
    assert np.array(more.params["prompt_logprob_token_ids"]).shape == (2, 50)
    assert more.params["prompt_logprob_token_ids"][0][40] == 7


def test_nothing_is_scored_where_there_is_nothing_to_score():
    assert scorings(request(), 100) == []
    assert scorings(request(target_prompt_tokens=np.full((4, 2), -1)), 100) == []
    alone = request(prompt=np.arange(1), prompt_logprobs=True, topk_prompt_logprobs=3)
    assert scorings(alone, 100) == []
