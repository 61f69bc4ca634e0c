"""What came out of an engine, choice by choice, in words that both dialects are written from."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np

from backends.contract import SampleDelta, SampledSequence, SampleResult
from server.core.usage import Sampled
from server.oai.decoding import TextStream
from server.oai.tokenizer import TextModel
from server.oai.transcript import Piece, ShownToken, Transcript, top_of
from server.oai.wire import Order


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """A whole one."""

    index: int
    piece: Piece
    finish_reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """What one choice gains; the last one says why it ended."""

    index: int
    piece: Piece
    first: bool
    finish_reason: str | None = None


@dataclass(slots=True)
class Tally:
    """What one prompt has cost so far."""

    prompt: int
    cached: int = 0
    generated: int = 0
    over: bool = False

    @property
    def cost(self) -> Sampled:
        return Sampled(prompt=self.prompt, cached=self.cached, generated=self.generated)

    def finish(self, result: SampleResult) -> None:
        self.cached = min(result.prompt_cache_hit_tokens, self.prompt)
        self.generated = sum(len(sequence.tokens) for sequence in result.sequences)
        self.over = True


@dataclass(slots=True)
class Prompt:
    """One prompt of a request, and the choices that follow it."""

    tokens: np.ndarray
    text: str | None
    """As it was sent, if it was sent as text."""
    order: Order
    model: TextModel
    ends: tuple[int, ...]
    first_index: int
    tally: Tally = field(init=False)
    _transcripts: dict[int, Transcript] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.tally = Tally(len(self.tokens))

    def choices(self, result: SampleResult) -> Iterator[Choice]:
        """Of a result that came whole."""
        echo = self._echo(result) if self.order.echo else Piece("", ())
        for number, sequence in enumerate(result.sequences):
            transcript = self._transcript(len(echo.text))
            begin = transcript.push(sequence.tokens, sequence.logprobs, sequence.topk)
            yield Choice(
                index=self.first_index + number,
                piece=joined(echo, begin, transcript.finish()),
                finish_reason=_reason(transcript, sequence),
            )

    def gain(self, delta: SampleDelta) -> Step:
        first = delta.index not in self._transcripts
        begin = self._begin(delta.index) if first else Piece("", ())
        self.tally.generated += len(delta.tokens)
        more = self._transcripts[delta.index].push(delta.tokens, delta.logprobs, delta.topk)
        return Step(index=self.first_index + delta.index, piece=joined(begin, more), first=first)

    def ends_with(self, result: SampleResult) -> Iterator[Step]:
        """The last step of each choice."""
        self.tally.finish(result)
        for number, sequence in enumerate(result.sequences):
            first = number not in self._transcripts
            begin = self._begin(number) if first else Piece("", ())
            transcript = self._transcripts[number]
            yield Step(
                index=self.first_index + number,
                piece=joined(begin, transcript.finish()),
                first=first,
                finish_reason=_reason(transcript, sequence),
            )

    def _begin(self, number: int) -> Piece:
        """Of a choice that is streamed; an echo has no logprobs there."""
        echo = Piece(self._prompt_text(), ()) if self.order.echo else Piece("", ())
        self._transcripts[number] = self._transcript(len(echo.text))
        return echo

    def _transcript(self, offset: int) -> Transcript:
        stream = self.model.stream(self.ends)
        return Transcript(stream, self.order.stops, self.ends, offset)

    def _prompt_text(self) -> str:
        if self.text is not None:
            return self.text
        stream = self.model.stream()
        return "".join([*map(stream.push, self.tokens.tolist()), stream.flush()])

    def _echo(self, result: SampleResult) -> Piece:
        """The prompt's text; with its tokens where their logprobs were asked for."""
        tokens = []
        if result.prompt_logprobs is not None:
            tokens = list(self._echoed(result, self.model.stream(show_special=True)))
        return Piece(self._prompt_text(), tokens)

    def _echoed(self, result: SampleResult, stream: TextStream) -> Iterator[ShownToken]:
        assert result.prompt_logprobs is not None
        offset = 0
        for i, token in enumerate(self.tokens.tolist()):
            logprob = float(result.prompt_logprobs[i]) if i else None
            topk = result.topk_prompt_logprobs
            yield ShownToken(token, logprob, top_of(topk, i) if topk and i else (), offset)
            offset += len(stream.push(token))


def joined(*pieces: Piece) -> Piece:
    tokens: list[ShownToken] = [token for piece in pieces for token in piece.tokens]
    return Piece("".join(piece.text for piece in pieces), tokens)


def total(tallies: Sequence[Tally]) -> dict[str, object]:
    """As `usage`. A prompt counts once, whatever the number of its choices."""
    prompt = sum(tally.prompt for tally in tallies)
    generated = sum(tally.generated for tally in tallies)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": generated,
        "total_tokens": prompt + generated,
        "prompt_tokens_details": {"cached_tokens": sum(tally.cached for tally in tallies)},
    }


def _reason(transcript: Transcript, sequence: SampledSequence) -> str:
    return "stop" if transcript.stopped else sequence.stop_reason
