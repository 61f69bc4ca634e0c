"""The result of a sample, to protobuf."""

from __future__ import annotations

from typing import Any

import numpy as np

from backends.contract import SampledSequence, SampleResult, TopkLogprobs
from server.wire import schema
from server.wire.tensors import SparseLayout


def encode_sample_result(result: SampleResult, layout: SparseLayout | None = None) -> bytes:
    """A `SampleResponse`; `layout` is that of the targets asked for, when they were sparse."""
    message = schema.SampleResponse(prompt_cache_hit_tokens=result.prompt_cache_hit_tokens)
    for sequence in result.sequences:
        _set_sequence(message.sequences.add(), sequence)
    if result.prompt_logprobs is not None:
        message.prompt_logprobs = _float_bytes(result.prompt_logprobs)
    if result.topk_prompt_logprobs is not None:
        _set_topk(message.topk_prompt_logprobs, result.topk_prompt_logprobs)
    if result.target_prompt_logprobs is not None:
        _set_targets(message.target_prompt_logprobs, result.target_prompt_logprobs, layout)
    if result.prompt_alt_tokens is not None and result.prompt_alt_logprobs is not None:
        alternatives = message.prompt_alt_tokens
        _set_dense(alternatives.tokens, result.prompt_alt_tokens)
        _set_dense(alternatives.logprobs, result.prompt_alt_logprobs)
    return message.SerializeToString()


def _float_bytes(array: np.ndarray) -> bytes:
    return array.astype("<f4", copy=False).tobytes()


def _set_sequence(message: Any, sequence: SampledSequence) -> None:
    message.stop_reason = schema.STOP_REASONS[sequence.stop_reason]
    message.tokens = sequence.tokens.astype("<i4", copy=False).tobytes()
    message.logprobs = _float_bytes(sequence.logprobs)
    if sequence.topk is not None:
        _set_topk(message.topk_sampled_logprobs, sequence.topk)


def _set_topk(message: Any, topk: TopkLogprobs) -> None:
    message.length, message.k = topk.token_ids.shape
    message.token_ids = topk.token_ids.astype("<i4", copy=False).tobytes()
    message.logprobs = _float_bytes(topk.logprobs)


def _set_dense(message: Any, array: np.ndarray) -> None:
    message.shape.extend(array.shape)
    if array.dtype.kind == "f":
        message.dtype = schema.DTYPE_FLOAT32
        message.dense = _float_bytes(array)
    else:
        message.dtype = schema.DTYPE_INT64
        message.dense = array.astype("<i8", copy=False).tobytes()


def _set_targets(message: Any, logprobs: np.ndarray, layout: SparseLayout | None) -> None:
    if layout is None:
        _set_dense(message, logprobs)
        return
    message.dtype = schema.DTYPE_FLOAT32
    message.shape.extend(layout.shape)
    message.sparse_csr.values = _float_bytes(logprobs[layout.rows, layout.col])
    message.sparse_csr.crow_indices = layout.crow.astype("<i8", copy=False).tobytes()
    message.sparse_csr.col_indices = layout.col.astype("<i8", copy=False).tobytes()
