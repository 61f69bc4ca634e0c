"""Tokens drawn in place of each token of a prompt. vLLM samples only at the end of a text, so every
prefix of the prompt is sent as a text of its own, of which vLLM mostly has the cached values.

Shapes: T tokens of the prompt, k draws a position. Row i is drawn after token i.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import numpy as np

from backends.contract import SampleRequest
from backends.sampling.requests import DIVERGED
from backends.sampling.vllm.answer import Answer
from backends.sampling.vllm.client import Body
from backends.sampling.vllm.errors import RequestFailed
from backends.sampling.vllm.together import together
from backends.sampling.vllm.translate import Limits, call, derived_seed

_AT_ONCE = 16
"""Positions of one request that vLLM works on together; it has others to serve."""

Generate = Callable[[Body], Awaitable[Answer]]


async def drawn_alternatives(
    request: SampleRequest, model: str, seed: int, limits: Limits, generate: Generate
) -> dict[str, Any]:
    """The fields of a SampleResult; k draws at `temperature` and nothing else. Raises
    RequestFailed for weights that diverged."""
    shape = (len(request.prompt) - 1, request.prompt_alt_tokens_k)
    tokens, logprobs = np.zeros(shape, np.int64), np.zeros(shape, np.float32)
    room = asyncio.Semaphore(_AT_ONCE)

    async def draw(row: int, columns: slice) -> None:
        params = {
            "n": columns.stop - columns.start,
            "max_tokens": 1,
            "temperature": request.temperature,
            "seed": derived_seed(seed, f"alternatives:{row}:{columns.start}"),
        }
        body = call(request, model, request.prompt[: row + 1], params)
        async with room:
            answer = await generate(body)
        drawn = [choice.positions[0] for choice in answer.choices]
        if any(score.is_nan for score in drawn):
            raise RequestFailed(DIVERGED)
        tokens[row, columns] = [score.token_id for score in drawn]
        logprobs[row, columns] = [score.logprob for score in drawn]

    async with together() as group:
        for row in range(shape[0]):
            for first in range(0, shape[1], limits.max_num_seqs):
                last = min(first + limits.max_num_seqs, shape[1])
                group.create_task(draw(row, slice(first, last)))
    return {"prompt_alt_tokens": tokens, "prompt_alt_logprobs": logprobs}
