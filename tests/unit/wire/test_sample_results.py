"""What we encode, read by the SDK."""

from __future__ import annotations

from typing import Any

import numpy as np
import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from tinker.proto.response_conv import deserialize_sample_response

from backends.contract import SampledSequence, SampleResult, TopkLogprobs
from server.wire.json_results import sample_json
from server.wire.sample_results import encode_sample_result
from server.wire.tensors import SparseLayout

logprob = st.floats(-50, 0, width=32)


def sequence(length: int = 2, **fields: Any) -> SampledSequence:
    return SampledSequence(
        tokens=np.arange(length, dtype=np.int32),
        logprobs=-np.arange(length, dtype=np.float32),
        stop_reason="stop",
        **fields,
    )


def read(result: SampleResult, layout: SparseLayout | None = None) -> Any:
    return deserialize_sample_response(encode_sample_result(result, layout))


@given(
    st.lists(
        st.builds(
            lambda ids, reason: SampledSequence(
                tokens=ids, logprobs=-ids.astype(np.float32) / 7, stop_reason=reason
            ),
            hnp.arrays(np.int32, st.integers(1, 5), elements=st.integers(0, 2**31 - 1)),
            st.sampled_from(["stop", "length"]),
        ),
        max_size=4,
    )
)
def test_the_sdk_reads_the_sequences(sequences: list[SampledSequence]) -> None:
    answer = read(SampleResult(sequences=tuple(sequences), prompt_cache_hit_tokens=3))

    assert answer.prompt_cache_hit_tokens == 3
    assert len(answer.sequences) == len(sequences)
    for theirs, ours in zip(answer.sequences, sequences, strict=True):
        assert theirs.stop_reason == ours.stop_reason
        np.testing.assert_array_equal(theirs.tokens_np, ours.tokens)
        np.testing.assert_array_equal(theirs.logprobs_np, ours.logprobs)


def test_what_was_not_asked_for_is_absent() -> None:
    answer = read(SampleResult(sequences=(sequence(),)))

    assert answer.prompt_logprobs is None
    assert answer.topk_prompt_logprobs is None
    assert answer.target_prompt_logprobs is None
    assert answer.prompt_alt_tokens is None
    assert answer.sequences[0].topk_logprobs is None


def test_positions_without_a_logprob_are_none() -> None:
    logprobs = np.array([np.nan, -1.5, -2], dtype=np.float32)

    answer = read(SampleResult(sequences=(), prompt_logprobs=logprobs))

    assert answer.prompt_logprobs == [None, -1.5, -2.0]


def topk() -> TopkLogprobs:
    """Nothing at position 0, and only one token at position 2."""
    return TopkLogprobs(
        token_ids=np.array([[0, 0], [4, 0], [7, 0]], dtype=np.int32),
        logprobs=np.array([[-99999, -99999], [-0.5, -1], [-0.25, -99999]], dtype=np.float32),
    )


TOPK_LISTS = [None, [(4, -0.5), (0, -1.0)], [(7, -0.25)]]


def test_the_best_tokens_are_read_with_nothing_where_there_is_nothing() -> None:
    answer = read(SampleResult(sequences=(sequence(3, topk=topk()),), topk_prompt_logprobs=topk()))

    assert answer.topk_prompt_logprobs == TOPK_LISTS
    assert answer.sequences[0].topk_logprobs == TOPK_LISTS


@given(hnp.arrays(np.float32, st.tuples(st.integers(0, 4), st.integers(1, 4)), elements=logprob))
def test_dense_targets_are_answered_dense(logprobs: np.ndarray) -> None:
    answer = read(SampleResult(sequences=(), target_prompt_logprobs=logprobs))

    assert answer.target_prompt_logprobs.shape == list(logprobs.shape)
    assert answer.target_prompt_logprobs.dtype == "float32"
    np.testing.assert_array_equal(answer.target_prompt_logprobs.to_numpy(), logprobs)


@given(hnp.arrays(np.bool_, st.tuples(st.integers(1, 5), st.integers(1, 6))))
def test_sparse_targets_are_answered_in_the_pattern_they_were_asked_in(asked: np.ndarray) -> None:
    rows, col = np.nonzero(asked)
    crow = np.concatenate([[0], np.cumsum(asked.sum(axis=1))])
    layout = SparseLayout(shape=(asked.shape[0], asked.shape[1]), crow=crow, col=col)
    logprobs = np.where(asked, -1 - np.arange(asked.size).reshape(asked.shape), 0)

    tensor = read(
        SampleResult(sequences=(), target_prompt_logprobs=logprobs.astype(np.float32)), layout
    ).target_prompt_logprobs

    assert tensor.sparse_crow_indices == crow.tolist()
    assert tensor.sparse_col_indices == col.tolist()
    assert tensor.shape == list(asked.shape)
    assert tensor.data == logprobs[rows, col].tolist()


@pytest.mark.parametrize("shape", [(3, 2), (0, 2)])
def test_alternative_tokens_are_read_with_their_logprobs(shape: tuple[int, int]) -> None:
    tokens = np.arange(shape[0] * shape[1]).reshape(shape)
    logprobs = -tokens.astype(np.float32)

    answer = read(
        SampleResult(sequences=(), prompt_alt_tokens=tokens, prompt_alt_logprobs=logprobs)
    ).prompt_alt_tokens

    np.testing.assert_array_equal(answer.tokens.to_numpy(), tokens)
    np.testing.assert_array_equal(answer.logprobs.to_numpy(), logprobs)


def test_old_sdks_get_lists_with_null_where_there_is_nothing() -> None:
    result = SampleResult(
        sequences=(sequence(),),
        prompt_logprobs=np.array([np.nan, -1.5], dtype=np.float32),
        topk_prompt_logprobs=topk(),
    )
    answer = sample_json(encode_sample_result(result))

    assert orjson.loads(orjson.dumps(answer)) == {
        "type": "sample",
        "sequences": [{"stop_reason": "stop", "tokens": [0, 1], "logprobs": [0.0, -1.0]}],
        "prompt_logprobs": [None, -1.5],
        "topk_prompt_logprobs": [None, [[4, -0.5], [0, -1.0]], [[7, -0.25]]],
    }


def test_old_sdks_get_no_field_that_was_not_asked_for() -> None:
    empty = encode_sample_result(SampleResult(sequences=()))

    assert sample_json(empty) == {"type": "sample", "sequences": []}
