"""One sample as its reader sees it: text without stop strings, and the tokens behind it."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from backends.contract import TopkLogprobs
from server.oai.decoding import TextStream


@dataclass(frozen=True, slots=True)
class ShownToken:
    token: int
    logprob: float | None
    """None for the first token of a prompt, which nothing predicts."""
    top: Sequence[tuple[int, float]]
    """The most likely tokens in its place, best first."""
    offset: int
    """Where its text begins."""


@dataclass(frozen=True, slots=True)
class Piece:
    text: str
    tokens: Sequence[ShownToken]


class Transcript:
    """Holds back what may turn out to be the beginning of a stop string."""

    def __init__(
        self, stream: TextStream, stops: Sequence[str], ends: Collection[int], offset: int = 0
    ) -> None:
        """`ends` are the tokens that end a sample by themselves; `offset` is where it begins."""
        self._stream = stream
        self._stops = stops
        self._ends = ends
        self._held = ""
        self._tokens: list[ShownToken] = []
        self._shown = self._written = offset
        self.stopped = False
        """A stop string was seen: whatever comes behind it is dropped."""

    def push(
        self, tokens: np.ndarray, logprobs: np.ndarray, topk: TopkLogprobs | None = None
    ) -> Piece:
        for i, token in enumerate(tokens.tolist()):
            if self.stopped:
                break
            if token not in self._ends:
                top = [] if topk is None else top_of(topk, i)
                self._tokens.append(ShownToken(token, float(logprobs[i]), top, self._written))
                self._write(self._stream.push(token))
        return self._release(over=False)

    def finish(self) -> Piece:
        if not self.stopped:
            self._write(self._stream.flush())
        return self._release(over=True)

    def _write(self, text: str) -> None:
        self._held += text
        self._written += len(text)
        found = [at for stop in self._stops if (at := self._held.find(stop)) >= 0]
        if found:
            self._held = self._held[: min(found)]
            self.stopped = True

    def _release(self, *, over: bool) -> Piece:
        waits = 0 if over or self.stopped else _begun(self._held, self._stops)
        text = self._held[: len(self._held) - waits]
        self._held = self._held[len(text) :]
        self._shown += len(text)
        everything = over and not self.stopped
        ready = [one for one in self._tokens if everything or one.offset < self._shown]
        self._tokens = self._tokens[len(ready) :]
        return Piece(text, ready)


def top_of(topk: TopkLogprobs, row: int) -> list[tuple[int, float]]:
    ids, logprobs = topk.token_ids[row].tolist(), topk.logprobs[row].tolist()
    return list(zip(ids, logprobs, strict=True))


def _begun(text: str, stops: Iterable[str]) -> int:
    """How much of the text's end may be the beginning of a stop string."""
    return max((_overlap(text, stop) for stop in stops), default=0)


def _overlap(text: str, stop: str) -> int:
    for length in range(min(len(text), len(stop) - 1), 0, -1):
        if stop.startswith(text[-length:]):
            return length
    return 0
