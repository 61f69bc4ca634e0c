"""A request under way: its prompt is read once, then every sample continues a copy of it."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field, replace

import numpy as np
from torch import Tensor

from backends.contract import SampledSequence, SampleRequest, SampleResult, TopkLogprobs
from backends.lora.adapter import Adapter
from backends.sampling.choice import Rule, fresh_seed, stream
from backends.sampling.kv import Row
from backends.sampling.prefix_cache import CacheKey, Entry
from backends.sampling.scoring import PromptScorer
from backends.sampling.stops import Decoder, StopWatch


class Job:
    """One request. `filled` prompt tokens are read; `pending` samples have not begun."""

    def __init__(self, request: SampleRequest, max_context_length: int) -> None:
        self.request = request
        self.id = request.request_id
        self.key = CacheKey(request.adapter, request.cache_namespace)
        self.prompt = request.prompt
        self.max_new = min(request.max_tokens, max_context_length - len(request.prompt))
        self.rule = Rule(request.temperature, request.top_k, request.top_p)
        self.seed = fresh_seed() if request.seed is None else request.seed
        self.scorer = PromptScorer(request, self.seed)
        self.adapter: Adapter | None = None
        self.entry: Entry | None = None
        self.filled = 0
        self.hit_tokens: int | None = None
        """None until the cache was asked."""
        self.first_logits: Tensor | None = None
        """float32[V] after the prompt: every sample's first token is drawn from it."""
        self.pending = deque(range(request.num_samples))
        self.idle_rooms = 0
        """Reserved rooms (of `row_tokens`) that none of its samples is using."""
        self.rooms = 0
        self.sequences: list[SampledSequence | None] = [None] * request.num_samples

    @property
    def row_tokens(self) -> int:
        """The most keys and values a sample needs beside the prompt's own. The last token's are
        never read, so a single token needs none."""
        return len(self.prompt) + self.max_new - 1 if self.max_new > 1 else 0

    @property
    def needed_tokens(self) -> int:
        """The room without which it cannot run at all: the prompt, and one sample."""
        return len(self.prompt) + self.row_tokens

    @property
    def read(self) -> bool:
        return self.filled == len(self.prompt)

    @property
    def done(self) -> bool:
        return None not in self.sequences

    def follow(self, folder: str, adapter: Adapter | None) -> None:
        """Go on with other weights. What is read stays as it is; a prompt that is not begun yet
        belongs with those that start with them."""
        self.request = replace(self.request, adapter=folder)
        self.adapter = adapter
        if self.hit_tokens is None:
            self.key = CacheKey(folder, self.request.cache_namespace)
            if self.entry is not None:
                self.entry.key = self.key

    def result(self) -> SampleResult:
        return SampleResult(
            sequences=tuple(s for s in self.sequences if s is not None),
            prompt_cache_hit_tokens=self.hit_tokens or 0,
            **self.scorer.result(),
        )


@dataclass(eq=False)
class Sample:
    """One continuation of a job's prompt."""

    job: Job
    index: int
    decoder: Decoder
    row: Row | None = None
    """Where it decodes; None until it has a token whose successor is wanted."""
    tokens: list[int] = field(default_factory=list)
    _logprobs: list[float] = field(default_factory=list)
    _topk: list[tuple[np.ndarray, np.ndarray]] = field(default_factory=list)

    def __post_init__(self) -> None:
        request = self.job.request
        self._stream = stream(self.job.seed, self.index)
        self._stops = StopWatch(request.stop_token_ids, request.stop_strings, self.decoder)

    @property
    def context(self) -> np.ndarray:
        """int64[T + G]: the prompt and all that was generated."""
        return np.concatenate([self.job.prompt, np.array(self.tokens, np.int64)])

    def uniform(self) -> float:
        return 0.0 if self.job.rule.greedy else self._stream.random()

    def push(
        self, token: int, logprob: float, topk: tuple[np.ndarray, np.ndarray] | None
    ) -> SampledSequence | None:
        """Take a token; gives the whole sequence when that was the last one."""
        self.tokens.append(token)
        self._logprobs.append(logprob)
        if topk is not None:
            self._topk.append(topk)
        if self._stops.push(token):
            return self._sequence(stopped=True)
        if len(self.tokens) >= self.job.max_new:
            return self._sequence(stopped=False)
        return None

    def _sequence(self, *, stopped: bool) -> SampledSequence:
        return SampledSequence(
            tokens=np.array(self.tokens, np.int32),
            logprobs=np.array(self._logprobs, np.float32),
            stop_reason="stop" if stopped else "length",
            topk=self._topk_logprobs(),
        )

    def _topk_logprobs(self) -> TopkLogprobs | None:
        if not self.job.request.topk_sample_logprobs:
            return None
        ids, logprobs = zip(*self._topk, strict=True)
        return TopkLogprobs(token_ids=np.stack(ids), logprobs=np.stack(logprobs))
