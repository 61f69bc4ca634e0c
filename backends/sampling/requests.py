"""What every sampling engine says of a request in the same words. No torch."""

from __future__ import annotations

import numpy as np

from backends.contract import Failure, SampledSequence, SampleRequest, TopkLogprobs

GREEDY_BELOW = 1e-5
"""Temperatures under this are greedy; dividing by them would only add rounding."""

NO_LOGPROB = -99999.0
"""What stands in a top-k row of a position that has no distribution."""

DIVERGED = Failure(
    message="the model's logits are nan or infinite: these weights have diverged",
    category="user",
)
CANCELLED = Failure(message="cancelled by the client", category="user")


def empty_sequence(request: SampleRequest) -> SampledSequence:
    """What a request that leaves no room for a single token gets."""
    none = np.zeros((0, request.topk_sample_logprobs), np.float32)
    return SampledSequence(
        tokens=np.zeros(0, np.int32),
        logprobs=np.zeros(0, np.float32),
        stop_reason="length",
        topk=TopkLogprobs(token_ids=none.astype(np.int32), logprobs=none)
        if request.topk_sample_logprobs
        else None,
    )


def mistake(request: SampleRequest, vocab_size: int, max_context_length: int) -> Failure | None:
    """What is wrong with a request, in one sentence, or None."""
    length = len(request.prompt)
    targets = request.target_prompt_tokens
    topk = (request.topk_prompt_logprobs, request.topk_sample_logprobs)
    if request.prompt.ndim != 1 or request.prompt.dtype != np.int64:
        message = f"prompt is {request.prompt.dtype}{list(request.prompt.shape)}, not int64[T]"
    elif not 1 <= length <= max_context_length:
        message = f"prompt has {length} tokens; this model takes 1 to {max_context_length}"
    elif not _in_range(request.prompt, 0, vocab_size):
        message = f"prompt has a token outside 0..{vocab_size - 1}"
    elif request.num_samples < 1:
        message = f"num_samples is {request.num_samples}; it must be at least 1"
    elif not (request.temperature >= 0 and np.isfinite(request.temperature)):
        message = f"temperature is {request.temperature}; it must be finite and not negative"
    elif min(topk) < 0 or max(topk) > vocab_size:
        message = f"top-k logprobs are of 0 to {vocab_size} tokens, not {topk}"
    elif targets is not None and not _fits(targets, length - 1):
        shape = list(targets.shape)
        message = f"target_prompt_tokens is {targets.dtype}{shape}, not int64[{length - 1}, K]"
    elif targets is not None and not _in_range(targets, -1, vocab_size):
        message = f"target_prompt_tokens has a token outside -1..{vocab_size - 1}"
    else:
        return None
    return Failure(message=message, category="user")


def _fits(targets: np.ndarray, length: int) -> bool:
    return targets.ndim == 2 and targets.dtype == np.int64 and len(targets) == length


def _in_range(tokens: np.ndarray, low: int, high: int) -> bool:
    return bool(((tokens >= low) & (tokens < high)).all())
