"""The prompt's scores in a vLLM answer, brought to the contract's terms.

Shapes: T tokens of the prompt, K chosen tokens or alternatives a position. Row i scores position
i + 1.
"""

from __future__ import annotations

import base64
import io
from collections.abc import Sequence
from typing import Any

import numpy as np

from backends.contract import SampleRequest, TopkLogprobs
from backends.sampling.requests import NO_LOGPROB
from backends.sampling.vllm.answer import Answer, PromptScore
from backends.sampling.vllm.translate import Scoring, first_asked_row, is_greedy

Row = dict[int, PromptScore]


def prompt_fields(
    request: SampleRequest, scored: Sequence[tuple[Scoring, Answer]]
) -> dict[str, Any]:
    """The prompt's fields of a SampleResult, but for alternatives that were drawn."""
    rows: list[Row] = []
    if scored and scored[0][1].prompt_logprobs is not None:
        rows = [row for row in scored[0][1].prompt_logprobs if row is not None]
    fields: dict[str, Any] = {}
    if request.prompt_logprobs:
        fields["prompt_logprobs"] = _own(request, rows)
    if request.topk_prompt_logprobs:
        fields["topk_prompt_logprobs"] = _topk(request, rows)
    if request.target_prompt_tokens is not None:
        fields["target_prompt_logprobs"] = _targets(request.target_prompt_tokens, scored)
    if request.prompt_alt_tokens_k and is_greedy(request):
        fields |= _greedy_alternatives(request.prompt_alt_tokens_k, rows)
    return fields


def _first_position(request: SampleRequest) -> int:
    last_n = request.prompt_logprobs_last_n
    return 1 if last_n is None else max(1, len(request.prompt) - last_n)


def _own(request: SampleRequest, rows: Sequence[Row]) -> np.ndarray:
    logprobs = np.full(len(request.prompt), np.nan, np.float32)
    for position in range(_first_position(request), len(request.prompt)):
        logprobs[position] = rows[position - 1][int(request.prompt[position])].logprob
    return logprobs


def _topk(request: SampleRequest, rows: Sequence[Row]) -> TopkLogprobs:
    k, length = request.topk_prompt_logprobs, len(request.prompt)
    ids = np.zeros((length, k), np.int32)
    logprobs = np.full((length, k), NO_LOGPROB, np.float32)
    for position in range(_first_position(request), length):
        best = _best(rows[position - 1], k)
        ids[position] = [token for token, _ in best]
        logprobs[position] = [score.logprob for _, score in best]
    return TopkLogprobs(token_ids=ids, logprobs=logprobs)


def _best(row: Row, k: int) -> list[tuple[int, PromptScore]]:
    return sorted(row.items(), key=lambda item: -item[1].logprob)[:k]


def _targets(targets: np.ndarray, scored: Sequence[tuple[Scoring, Answer]]) -> np.ndarray:
    logprobs = np.zeros(targets.shape, np.float32)
    for scoring, answer in scored:
        if answer.prompt_token_id_logprobs is not None:
            part = np.load(io.BytesIO(base64.b64decode(answer.prompt_token_id_logprobs)))
            logprobs[first_asked_row(targets) :, scoring.columns] = part
    logprobs[targets < 0] = 0.0
    return logprobs


def _greedy_alternatives(k: int, rows: Sequence[Row]) -> dict[str, np.ndarray]:
    best = [_best(row, 1)[0] for row in rows]
    tokens = np.array([token for token, _ in best], np.int64)
    logprobs = np.array([score.logprob for _, score in best], np.float32)
    return {
        "prompt_alt_tokens": np.repeat(tokens[:, None], k, axis=1),
        "prompt_alt_logprobs": np.repeat(logprobs[:, None], k, axis=1),
    }
