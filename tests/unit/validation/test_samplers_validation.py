from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from backends.contract import ModelInfo, SampleRequest
from server.core.errors import BadInput
from server.samplers.validation import check_prompt, check_sample_request

INFO = ModelInfo(
    vocab_size=100,
    max_context_length=8,
    num_parameters=1000,
    dtype="float32",
    device="cpu",
    trainable_groups=(),
    eos_token_ids=(2,),
    losses={},
)
REQUEST = SampleRequest(request_id="r", prompt=np.array([1, 2, 3]), num_samples=1, max_tokens=5)


def check(**change: Any) -> None:
    check_sample_request(replace(REQUEST, **change), INFO)


ACCEPTED: list[dict[str, Any]] = [
    {},
    {"prompt": np.array([0, 99, 0, 99, 0, 99, 0]), "max_tokens": 1},
    {"temperature": 0.0, "top_p": 1e-9, "top_k": 10**9},
    {"num_samples": 1024, "topk_prompt_logprobs": 100, "topk_sample_logprobs": 100},
    {"prompt_logprobs": True, "prompt_logprobs_last_n": 2, "prompt_alt_tokens_k": 100},
    {"target_prompt_tokens": np.array([[-1, 0], [99, -1]])},
    {"prompt": np.array([1]), "target_prompt_tokens": np.empty((0, 2), np.int64)},
    {"stop_token_ids": (0, 99), "stop_strings": ("a",)},
]


@pytest.mark.parametrize("change", ACCEPTED)
def test_what_an_engine_can_do_is_accepted(change: dict[str, Any]) -> None:
    check(**change)


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"prompt": np.array([], np.int64)}, "prompt: holds no token"),
    ({"prompt": np.array([1, 100])}, "prompt: token id 100 at position 1 is outside 0 to 99"),
    ({"prompt": np.array([-1])}, "prompt: token id -1 at position 0"),
    ({"max_tokens": 0}, "max_tokens: is 0; it must be at least 1"),
    ({"temperature": -0.1}, "temperature: is -0.1"),
    ({"temperature": math.nan}, "temperature: is nan"),
    ({"temperature": math.inf}, "temperature: is inf"),
    ({"top_p": 0.0}, "top_p: is 0.0; it must be above 0 and at most 1"),
    ({"top_p": 1.01}, "top_p: is 1.01"),
    ({"top_p": math.nan}, "top_p: is nan"),
    ({"top_k": 0}, "top_k: is 0; it must be at least 1, or -1 for no limit"),
    ({"top_k": -2}, "top_k: is -2"),
    ({"num_samples": 0}, "num_samples: is 0; it must be from 1 to 1024"),
    ({"num_samples": 1025}, "num_samples: is 1025"),
    ({"topk_prompt_logprobs": 101}, "topk_prompt_logprobs: is 101; it must be from 0 to 100"),
    ({"topk_prompt_logprobs": -1}, "topk_prompt_logprobs: is -1"),
    ({"topk_sample_logprobs": 101}, "topk_sample_logprobs: is 101"),
    ({"prompt_alt_tokens_k": 101}, "prompt_alt_tokens_k: is 101"),
    ({"prompt_logprobs_last_n": 1}, "last_n: needs prompt_logprobs, which is off"),
    ({"prompt_logprobs": True, "prompt_logprobs_last_n": 0}, "is 0; it must be from 1 to 2"),
    ({"prompt_logprobs": True, "prompt_logprobs_last_n": 3}, "is 3; it must be from 1 to 2"),
    ({"target_prompt_tokens": np.array([1, 2])}, r"has shape \[2\]; a prompt of 3 tokens"),
    ({"target_prompt_tokens": np.ones((3, 1), int)}, r"\[3, 1\]; .* 3 tokens needs \[2, K\]"),
    ({"target_prompt_tokens": np.ones((2, 0), int)}, r"\[2, 0\]"),
    ({"target_prompt_tokens": np.array([[1], [100]])}, "id 100 at position 1, 0 is outside -1"),
    ({"target_prompt_tokens": np.array([[1], [-2]])}, "token id -2 at position 1, 0"),
    ({"stop_token_ids": (1, 10**30)}, "stop: token id 10+ at position 1"),
    ({"stop_token_ids": (-1,)}, "stop: token id -1 at position 0"),
    ({"stop_strings": ("a", "")}, "stop: holds an empty string"),
]


@pytest.mark.parametrize(("change", "finding"), REFUSED)
def test_what_an_engine_cannot_do_is_refused_by_its_field(
    change: dict[str, Any], finding: str
) -> None:
    with pytest.raises(BadInput, match=finding):
        check(**change)


def test_a_prompt_must_leave_room_for_one_token() -> None:
    check_prompt(np.ones(7, np.int64), INFO)
    with pytest.raises(BadInput, match="holds 8 tokens; the limit is 7, which leaves room for one"):
        check(prompt=np.ones(8, np.int64), max_tokens=0)
