"""Samples as they come out of vLLM, brought to the contract's terms.

vLLM's own stopping only saves work: where a sample ends is decided here, token by token, by the
rule of every engine (`sampling/stops.py`). vLLM looks for a stop string in text that it holds back
while a character is incomplete, so it can run a token too far.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from backends.contract import SampleDelta, SampledSequence, SampleRequest, TopkLogprobs
from backends.sampling.requests import DIVERGED
from backends.sampling.stops import Decoder, StopWatch
from backends.sampling.vllm.answer import Choice, Position, Score
from backends.sampling.vllm.errors import ReplicaLost, RequestFailed


class SampleReader:
    """One sample. `add` takes it piece by piece."""

    def __init__(self, request: SampleRequest, decoder: Decoder) -> None:
        self._k = request.topk_sample_logprobs
        self._watch = StopWatch(request.stop_token_ids, request.stop_strings, decoder)
        self._tokens: list[int] = []
        self._positions: list[Position] = []
        self._complete = False

    def add(self, choice: Choice) -> range:
        """Take a piece; gives the positions of the sample that it has filled. Raises RequestFailed
        for weights that diverged, ReplicaLost when vLLM gave up on the sample."""
        before = len(self._tokens)
        for token, position in zip(choice.token_ids, choice.positions, strict=True):
            if self._complete:
                break
            if position.is_nan:
                raise RequestFailed(DIVERGED)
            self._tokens.append(token)
            self._positions.append(position)
            self._complete = self._watch.push(token)
        if not self._complete and choice.finish_reason in ("abort", "error"):
            raise ReplicaLost("vLLM ended the request before it was done")
        # It saw a stop string where we do not: in text that begins with a space, say.
        self._complete |= choice.finish_reason == "stop"
        return range(before, len(self._tokens))

    def tokens(self, part: range) -> list[int]:
        return self._tokens[part.start : part.stop]

    def delta(self, index: int, part: range) -> SampleDelta:
        return SampleDelta(
            index=index,
            tokens=np.array(self.tokens(part), np.int32),
            logprobs=self._logprobs(part),
            topk=self._topk(part),
        )

    def sequence(self) -> SampledSequence:
        everything = range(len(self._tokens))
        return SampledSequence(
            tokens=np.array(self._tokens, np.int32),
            logprobs=self._logprobs(everything),
            stop_reason="stop" if self._complete else "length",
            topk=self._topk(everything),
        )

    def _logprobs(self, part: range) -> np.ndarray:
        return np.array([self._positions[i].logprob for i in part], np.float32)

    def _topk(self, part: range) -> TopkLogprobs | None:
        if not self._k:
            return None
        best = [best_first(self._positions[i].top_logprobs, self._k) for i in part]
        return TopkLogprobs(
            token_ids=np.array([[s.token_id for s in row] for row in best], np.int32),
            logprobs=np.array([[s.logprob for s in row] for row in best], np.float32),
        )


def best_first(scores: Sequence[Score], k: int) -> list[Score]:
    """The k best; vLLM adds the sampled token where it is not among them."""
    return sorted(scores, key=lambda score: -score.logprob)[:k]
