"""The two dialects of answers: chat completions, and the completions before them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from server.oai.choices import Choice, Step
from server.oai.tokenizer import TextModel, shown
from server.oai.transcript import Piece, ShownToken

Json = dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Head:
    """What every part of an answer begins with."""

    id: str
    created: int
    model: str
    logprobs: bool

    def of(self, kind: str, choices: list[Json]) -> Json:
        head = {"id": self.id, "object": kind, "created": self.created, "model": self.model}
        return {**head, "system_fingerprint": None, "choices": choices}


class Dialect(Protocol):
    prefix: str

    def whole(self, head: Head, choices: Sequence[Choice], text: TextModel) -> Json: ...

    def chunks(self, head: Head, step: Step, text: TextModel) -> Iterator[Json]:
        """None, one or several for a step."""
        ...

    def last(self, head: Head) -> Json:
        """The chunk without choices, which carries the usage."""
        ...


class Chat:
    prefix = "chatcmpl"

    def whole(self, head: Head, choices: Sequence[Choice], text: TextModel) -> Json:
        return head.of("chat.completion", [self._choice(head, one, text) for one in choices])

    def chunks(self, head: Head, step: Step, text: TextModel) -> Iterator[Json]:
        if step.first:
            yield self._chunk(head, step.index, {"role": "assistant", "content": ""})
        if step.piece.text or step.piece.tokens:
            logprobs = self._logprobs(head, step.piece, text)
            yield self._chunk(head, step.index, {"content": step.piece.text}, logprobs)
        if step.finish_reason is not None:
            yield self._chunk(head, step.index, {}, finish_reason=step.finish_reason)

    def last(self, head: Head) -> Json:
        return head.of("chat.completion.chunk", [])

    def _choice(self, head: Head, choice: Choice, text: TextModel) -> Json:
        message = {"role": "assistant", "content": choice.piece.text, "refusal": None}
        return {
            "index": choice.index,
            "message": message,
            "logprobs": self._logprobs(head, choice.piece, text),
            "finish_reason": choice.finish_reason,
        }

    def _chunk(
        self,
        head: Head,
        index: int,
        delta: Json,
        logprobs: Json | None = None,
        finish_reason: str | None = None,
    ) -> Json:
        choice = {"index": index, "delta": delta}
        choice |= {"logprobs": logprobs, "finish_reason": finish_reason}
        return head.of("chat.completion.chunk", [choice])

    def _logprobs(self, head: Head, piece: Piece, text: TextModel) -> Json | None:
        if not head.logprobs:
            return None
        return {"content": [_chat_token(one, text) for one in piece.tokens], "refusal": None}


class Completions:
    prefix = "cmpl"

    def whole(self, head: Head, choices: Sequence[Choice], text: TextModel) -> Json:
        told = [self._choice(head, c.index, c.piece, text, c.finish_reason) for c in choices]
        return head.of("text_completion", told)

    def chunks(self, head: Head, step: Step, text: TextModel) -> Iterator[Json]:
        if step.piece.text or step.piece.tokens or step.finish_reason is not None:
            choice = self._choice(head, step.index, step.piece, text, step.finish_reason)
            yield head.of("text_completion", [choice])

    def last(self, head: Head) -> Json:
        return head.of("text_completion", [])

    def _choice(
        self, head: Head, index: int, piece: Piece, text: TextModel, finish_reason: str | None
    ) -> Json:
        return {
            "index": index,
            "text": piece.text,
            "logprobs": _legacy_logprobs(piece.tokens, text) if head.logprobs else None,
            "finish_reason": finish_reason,
        }


def _chat_token(one: ShownToken, text: TextModel) -> Json:
    top = [_spelled(token, logprob, text) for token, logprob in one.top]
    assert one.logprob is not None
    return {**_spelled(one.token, one.logprob, text), "top_logprobs": top}


def _spelled(token: int, logprob: float, text: TextModel) -> Json:
    spelling = text.spelling(token)
    return {"token": shown(spelling), "logprob": logprob, "bytes": list(spelling)}


def _legacy_logprobs(tokens: Sequence[ShownToken], text: TextModel) -> Json:
    return {
        "tokens": [shown(text.spelling(one.token)) for one in tokens],
        "token_logprobs": [one.logprob for one in tokens],
        "top_logprobs": [_legacy_top(one, text) for one in tokens],
        "text_offset": [one.offset for one in tokens],
    }


def _legacy_top(one: ShownToken, text: TextModel) -> dict[str, float] | None:
    """The chosen token is among them, even where it is none of the best."""
    if one.logprob is None:
        return None
    top = {shown(text.spelling(token)): logprob for token, logprob in one.top}
    return {**top, shown(text.spelling(one.token)): one.logprob}
