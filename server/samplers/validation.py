"""Whether a sample request makes sense, decided before it costs anything.

Shapes: T tokens of the prompt, K targets a position.
"""

from __future__ import annotations

import math

import numpy as np

from backends.contract import ModelInfo, SampleRequest
from server.core.errors import BadInput
from server.wire.checks import check_token_ids

MAX_NUM_SAMPLES = 1024
MAX_TOPK = 100
"""Also of `prompt_alt_tokens_k`: what travels back is this many numbers a position."""


def check_sample_request(request: SampleRequest, info: ModelInfo) -> None:
    """Raise BadInput for the first thing that is wrong."""
    check_prompt(request.prompt, info)
    _check_params(request, info)
    _check_scores(request)
    if request.target_prompt_tokens is not None:
        _check_targets(request.target_prompt_tokens, len(request.prompt), info)


def check_prompt(prompt: np.ndarray, info: ModelInfo) -> None:
    """It has a token, all are in the vocabulary, and at least one more fits the context."""
    if len(prompt) == 0:
        raise BadInput("prompt: holds no token; it needs at least 1.")
    most = info.max_context_length - 1
    if len(prompt) > most:
        raise BadInput(
            f"prompt: holds {len(prompt)} tokens; the limit is {most}, which leaves room for one."
        )
    check_token_ids("prompt", prompt, vocab_size=info.vocab_size)


def _check_params(request: SampleRequest, info: ModelInfo) -> None:
    _check_range("num_samples", request.num_samples, 1, MAX_NUM_SAMPLES)
    if request.max_tokens < 1:
        raise BadInput(
            f"sampling_params.max_tokens: is {request.max_tokens}; it must be at least 1."
        )
    if not (math.isfinite(request.temperature) and request.temperature >= 0):
        raise BadInput(
            f"sampling_params.temperature: is {request.temperature}; "
            f"it must be finite and at least 0."
        )
    if not 0 < request.top_p <= 1:
        raise BadInput(
            f"sampling_params.top_p: is {request.top_p}; it must be above 0 and at most 1."
        )
    if request.top_k < 1 and request.top_k != -1:
        raise BadInput(
            f"sampling_params.top_k: is {request.top_k}; it must be at least 1, or -1 for no limit."
        )
    stop_ids = np.array(request.stop_token_ids, dtype=object)
    check_token_ids("sampling_params.stop", stop_ids, vocab_size=info.vocab_size)
    if "" in request.stop_strings:
        raise BadInput("sampling_params.stop: holds an empty string, which would stop at once.")


def _check_range(name: str, value: int, least: int, most: int) -> None:
    if not least <= value <= most:
        raise BadInput(f"{name}: is {value}; it must be from {least} to {most}.")


def _check_scores(request: SampleRequest) -> None:
    _check_range("topk_prompt_logprobs", request.topk_prompt_logprobs, 0, MAX_TOPK)
    _check_range("topk_sample_logprobs", request.topk_sample_logprobs, 0, MAX_TOPK)
    _check_range("prompt_alt_tokens_k", request.prompt_alt_tokens_k, 0, MAX_TOPK)
    last_n = request.prompt_logprobs_last_n
    if last_n is None:
        return
    if not request.prompt_logprobs:
        raise BadInput("prompt_logprobs_last_n: needs prompt_logprobs, which is off.")
    most = len(request.prompt) - 1
    if not 1 <= last_n <= most:
        raise BadInput(
            f"prompt_logprobs_last_n: is {last_n}; it must be from 1 to {most}, "
            f"one less than the tokens of the prompt."
        )


def _check_targets(targets: np.ndarray, prompt_length: int, info: ModelInfo) -> None:
    if targets.ndim != 2 or len(targets) != prompt_length - 1 or targets.shape[1] < 1:
        raise BadInput(
            f"target_prompt_logprobs: has shape {list(targets.shape)}; a prompt of "
            f"{prompt_length} tokens needs [{prompt_length - 1}, K] with K at least 1."
        )
    check_token_ids("target_prompt_logprobs", targets, least=-1, vocab_size=info.vocab_size)
