"""A SampleRequest in vLLM's words: the bodies of its calls.

Generation is one call (more when one may not hold all samples). The prompt is scored in the same
call where that costs nothing extra, else in calls of their own that generate one token for nothing.

Shapes: T tokens of the prompt, K chosen tokens a position.
"""

from __future__ import annotations

from dataclasses import dataclass
from hashlib import blake2b
from typing import Any

import numpy as np

from backends.contract import Failure, SampleRequest
from backends.sampling.requests import GREEDY_BELOW, mistake
from backends.sampling.stops import Decoder
from backends.sampling.vllm.client import Body
from backends.sampling.vllm.errors import RequestFailed
from backends.sampling.vllm.model_facts import ModelFacts

LOWEST_TEMPERATURE = 0.01
"""vLLM raises what is lower, but not 0, to this."""
HIGHEST_TEMPERATURE = 2.0
_LONGEST_CHARACTER = 16
"""Tokens: more than any character takes."""
_SEED_BITS = 62
"""vLLM adds the number of the sample, and torch takes 64 bits with a sign."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What one call to this vLLM may ask for."""

    max_num_seqs: int
    max_logprobs: int


@dataclass(frozen=True, slots=True)
class Generation:
    """One call, and which samples each of its choices is."""

    body: Body
    samples: tuple[tuple[int, ...], ...]


@dataclass(frozen=True, slots=True)
class Scoring:
    """One call that scores the prompt: its own tokens, and some columns of the chosen ones."""

    params: dict[str, Any]
    columns: slice


def check(request: SampleRequest, facts: ModelFacts) -> None:
    """Raises RequestFailed for what no engine takes, and for what vLLM cannot do."""
    failure = mistake(request, facts.vocab_size, facts.max_context_length)
    temperature = request.temperature
    if failure is None and temperature > HIGHEST_TEMPERATURE:
        failure = _refusal(f"temperature is {temperature}; vLLM takes at most 2")
    if failure is None and GREEDY_BELOW <= temperature < LOWEST_TEMPERATURE:
        failure = _refusal(f"temperature is {temperature}; vLLM takes 0, or 0.01 and more")
    full = len(request.prompt) == facts.max_context_length
    if failure is None and full and (scorings(request, 1) or draws_alternatives(request)):
        failure = _refusal("vLLM can only score a prompt that leaves room for one more token")
    if failure is not None:
        raise RequestFailed(failure)


def is_greedy(request: SampleRequest) -> bool:
    return request.temperature < GREEDY_BELOW


def draws_alternatives(request: SampleRequest) -> bool:
    """Whether alternatives must be drawn; greedy ones are found by scoring."""
    return bool(request.prompt_alt_tokens_k) and not is_greedy(request)


def call(request: SampleRequest, model: str, tokens: np.ndarray, params: dict[str, Any]) -> Body:
    """Of one call on tokens[T]: what every call of a request has in common."""
    return {
        "model": model,
        "token_ids": tokens.tolist(),
        "cache_salt": _salt(request),
        "sampling_params": {"ignore_eos": True, "detokenize": False, "logprobs": 0} | params,
    }


def generations(
    request: SampleRequest,
    model: str,
    max_new: int,
    seed: int | None,
    limits: Limits,
    decoder: Decoder,
) -> list[Generation]:
    """The calls that generate. Greedy samples are all alike, and generated once."""
    common = _sampling_params(request, max_new) | _stop_strings(request, decoder)
    count = 1 if is_greedy(request) else request.num_samples
    generations = []
    for first in range(0, count, limits.max_num_seqs):
        size = min(limits.max_num_seqs, count - first)
        params = common | {"n": size}
        if seed is not None:
            params["seed"] = derived_seed(seed, f"samples:{first}")
        body = call(request, model, request.prompt, params)
        generations.append(Generation(body, tuple((first + i,) for i in range(size))))
    if is_greedy(request):
        everyone = tuple(range(request.num_samples))
        return [Generation(one.body, (everyone,)) for one in generations]
    return generations


def scorings(request: SampleRequest, max_logprobs: int) -> list[Scoring]:
    """What to ask for the prompt's scores, in as few calls as `max_logprobs` allows."""
    if len(request.prompt) == 1:
        return []
    own: dict[str, Any] = {}
    greedy_alternatives = bool(request.prompt_alt_tokens_k) and is_greedy(request)
    if request.prompt_logprobs or request.topk_prompt_logprobs or greedy_alternatives:
        own = {"prompt_logprobs": max(request.topk_prompt_logprobs, int(greedy_alternatives))}
    targets = request.target_prompt_tokens
    if targets is None or not (targets >= 0).any():
        return [Scoring(own, slice(0))] if own else []
    start = first_asked_row(targets)
    parts = []
    for first in range(0, targets.shape[1], max_logprobs):
        columns = slice(first, first + max_logprobs)
        chosen = {
            "prompt_logprob_token_ids": targets[start:, columns].tolist(),
            "prompt_logprob_start": start,
        }
        parts.append(Scoring(chosen if first else own | chosen, columns))
    return parts


def first_asked_row(targets: np.ndarray) -> int:
    """The first row of targets[T-1, K] that asks for anything."""
    return int(np.flatnonzero((targets >= 0).any(axis=1))[0])


def derived_seed(seed: int, purpose: str) -> int:
    """vLLM seeds sample i with seed + i: without this, neighbouring seeds would share samples."""
    digest = blake2b(f"{seed}:{purpose}".encode(), digest_size=8).digest()
    return int.from_bytes(digest) >> (64 - _SEED_BITS)


def _sampling_params(request: SampleRequest, max_new: int) -> dict[str, Any]:
    return {
        "max_tokens": max_new,
        "temperature": 0.0 if is_greedy(request) else request.temperature,
        "top_k": max(request.top_k, 0),
        "top_p": min(request.top_p, 1.0),
        # vLLM counts the sampled token among those it lists, even if it is none of the best.
        "logprobs": request.topk_sample_logprobs and request.topk_sample_logprobs + 1,
        "stop_token_ids": list(request.stop_token_ids),
    }


def _stop_strings(request: SampleRequest, decoder: Decoder) -> dict[str, Any]:
    strings = [text for text in request.stop_strings if text]
    # vLLM would take the whole prompt for generated text, and find them in it.
    if not strings or _ends_within_a_character(request.prompt, decoder):
        return {}
    return {
        "stop": strings,
        "detokenize": True,
        # A stop string may spell special tokens, and is looked for in plain text.
        "skip_special_tokens": False,
        "spaces_between_special_tokens": False,
    }


def _ends_within_a_character(prompt: np.ndarray, decoder: Decoder) -> bool:
    end = prompt[-_LONGEST_CHARACTER:].tolist()
    text = decoder.decode(end, skip_special_tokens=False, clean_up_tokenization_spaces=False)
    return text.endswith("\ufffd")


def _salt(request: SampleRequest) -> str:
    """Prefixes are shared only between requests of one adapter and one namespace."""
    key = f"{request.adapter or ''}\0{request.cache_namespace}"
    return blake2b(key.encode(), digest_size=16).hexdigest()


def _refusal(message: str) -> Failure:
    return Failure(message=message, category="user")
