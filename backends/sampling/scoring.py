"""Scores of the prompt's own tokens, of others in their place, and alternatives drawn there.

Shapes: T prompt tokens, n rows of a chunk, V vocabulary, K targets or alternatives. Row i is the
model's answer after token i: it scores position i + 1.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from backends.contract import SampleRequest, TopkLogprobs
from backends.sampling.choice import PROMPT_STREAM, draw, stream
from backends.sampling.requests import GREEDY_BELOW, NO_LOGPROB


class PromptScorer:
    """Takes the rows of one prompt in order, and keeps what the request asked of them."""

    def __init__(self, request: SampleRequest, seed: int) -> None:
        self._request = request
        self._prompt = request.prompt
        self._stream = stream(seed, PROMPT_STREAM)
        length = len(request.prompt)
        last_n = request.prompt_logprobs_last_n
        self._first_position = 1 if last_n is None else max(1, length - last_n)
        self.first_row = self._first_needed_row()
        """Rows before it need no logits; `T - 1` when none does."""
        self._logprobs = np.full(length, np.nan, np.float32)
        k = request.topk_prompt_logprobs
        self._topk_ids = np.zeros((length, k), np.int32)
        self._topk_logprobs = np.full((length, k), NO_LOGPROB, np.float32)
        self._targets = request.target_prompt_tokens
        shape = (0, 0) if self._targets is None else self._targets.shape
        self._target_logprobs = np.zeros(shape, np.float32)
        self._alt_tokens = np.zeros((length - 1, request.prompt_alt_tokens_k), np.int64)
        self._alt_logprobs = np.zeros((length - 1, request.prompt_alt_tokens_k), np.float32)

    def add(self, row: int, logits: Tensor) -> None:
        """Rows row..row+n of float32 logits[n, V], all before T - 1."""
        request = self._request
        logprobs = logits.log_softmax(dim=-1)
        if request.prompt_logprobs or request.topk_prompt_logprobs:
            skip = max(0, self._first_position - 1 - row)
            self._add_own(row + skip, logprobs[skip:])
        if self._targets is not None:
            self._add_targets(row, logprobs)
        if request.prompt_alt_tokens_k:
            self._add_alternatives(row, logits, logprobs)

    def result(self) -> dict[str, Any]:
        """The prompt's fields of a SampleResult."""
        request = self._request
        fields: dict[str, Any] = {}
        if request.prompt_logprobs:
            fields["prompt_logprobs"] = self._logprobs
        if request.topk_prompt_logprobs:
            fields["topk_prompt_logprobs"] = TopkLogprobs(
                token_ids=self._topk_ids, logprobs=self._topk_logprobs
            )
        if self._targets is not None:
            fields["target_prompt_logprobs"] = self._target_logprobs
        if request.prompt_alt_tokens_k:
            fields["prompt_alt_tokens"] = self._alt_tokens
            fields["prompt_alt_logprobs"] = self._alt_logprobs
        return fields

    def _first_needed_row(self) -> int:
        request = self._request
        needed = [len(request.prompt) - 1]
        if request.prompt_logprobs or request.topk_prompt_logprobs:
            needed.append(self._first_position - 1)
        if request.target_prompt_tokens is not None:
            asked = np.flatnonzero((request.target_prompt_tokens >= 0).any(axis=1))
            needed += asked[:1].tolist()
        if request.prompt_alt_tokens_k:
            needed.append(0)
        return min(needed)

    def _add_own(self, row: int, logprobs: Tensor) -> None:
        positions = slice(row + 1, row + 1 + len(logprobs))
        own = torch.from_numpy(self._prompt[positions]).to(logprobs.device)
        self._logprobs[positions] = logprobs.gather(1, own[:, None])[:, 0].cpu().numpy()
        if self._request.topk_prompt_logprobs:
            best = logprobs.topk(self._request.topk_prompt_logprobs)
            self._topk_ids[positions] = best.indices.cpu().numpy()
            self._topk_logprobs[positions] = best.values.cpu().numpy()

    def _add_targets(self, row: int, logprobs: Tensor) -> None:
        assert self._targets is not None
        rows = slice(row, row + len(logprobs))
        asked = torch.from_numpy(self._targets[rows]).to(logprobs.device)
        scores = logprobs.gather(1, asked.clamp(min=0)).masked_fill_(asked < 0, 0.0)
        self._target_logprobs[rows] = scores.cpu().numpy()

    def _add_alternatives(self, row: int, logits: Tensor, logprobs: Tensor) -> None:
        rows = slice(row, row + len(logits))
        k = self._request.prompt_alt_tokens_k
        temperature = self._request.temperature
        if temperature < GREEDY_BELOW:
            tokens = logits.argmax(dim=-1, keepdim=True).expand(-1, k)
        else:
            uniforms = self._stream.random((len(logits), k))
            tokens = draw(logits, [temperature] * len(logits), uniforms)
        self._alt_tokens[rows] = tokens.cpu().numpy()
        self._alt_logprobs[rows] = logprobs.gather(1, tokens).cpu().numpy()
