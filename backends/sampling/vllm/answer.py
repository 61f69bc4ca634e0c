"""What vLLM's `/inference/v1/generate` answers, as types."""

from __future__ import annotations

import msgspec

_NAN_SENT_AS = -9999.0


class Score(msgspec.Struct):
    token_id: int
    logprob: float

    @property
    def is_nan(self) -> bool:
        return self.logprob <= _NAN_SENT_AS


class Position(Score):
    top_logprobs: list[Score] = []
    """The sampled token and the best ones, in no promised order."""


class Logprobs(msgspec.Struct):
    content: list[Position] = []


class Choice(msgspec.Struct):
    index: int
    token_ids: list[int]
    logprobs: Logprobs | None = None
    finish_reason: str | None = None

    @property
    def positions(self) -> list[Position]:
        """One for each of `token_ids`; an aborted choice may have none."""
        return [] if self.logprobs is None else self.logprobs.content


class CacheDetails(msgspec.Struct):
    cached_tokens: int | None = None


class Usage(msgspec.Struct):
    prompt_tokens_details: CacheDetails | None = None


class PromptScore(msgspec.Struct):
    logprob: float


class Problem(msgspec.Struct):
    message: str


class Answer(msgspec.Struct):
    """A whole answer, or one event of a streamed one."""

    choices: list[Choice] = []
    usage: Usage | None = None
    prompt_logprobs: list[dict[int, PromptScore] | None] | None = None
    """[T], None at position 0; the prompt's own token and the best ones."""
    prompt_token_id_logprobs: str | None = None
    """A base64 .npy, float32[rows, K]"""
    error: Problem | None = None

    @property
    def cached_tokens(self) -> int:
        details = self.usage.prompt_tokens_details if self.usage else None
        return (details.cached_tokens or 0) if details else 0


class Refusal(msgspec.Struct):
    error: Problem


ANSWER = msgspec.json.Decoder(Answer)
REFUSAL = msgspec.json.Decoder(Refusal)
