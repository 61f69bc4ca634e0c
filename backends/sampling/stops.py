"""When a continuation is complete: stop tokens, and stop strings in its decoded text."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Protocol

_PATIENCE = 16
"""More pending tokens than this are no character in the making, but bytes that are no text."""


class Decoder(Protocol):
    """What is needed of a transformers tokenizer."""

    def decode(
        self,
        token_ids: Sequence[int],
        *,
        skip_special_tokens: bool,
        clean_up_tokenization_spaces: bool,
    ) -> str: ...


class StopWatch:
    """Reads a continuation token by token and says when it is complete. The text is decoded in
    a window of the last few tokens, so a token costs the same however long the text is."""

    def __init__(self, tokens: Collection[int], strings: Sequence[str], decoder: Decoder) -> None:
        self._stop_tokens = frozenset(tokens)
        self._stop_strings = tuple(filter(None, strings))
        self._decoder = decoder
        self._context: list[int] = []
        """Tokens already in the text; the next ones are decoded behind them, because what a
        token looks like can depend on the one before."""
        self._pending: list[int] = []
        """Tokens that may end in the middle of a character."""
        self._text = ""
        self._reach = max(map(len, self._stop_strings), default=1) - 1
        """How much of the text a stop string that is not complete yet can span."""

    def push(self, token: int) -> bool:
        """Whether this token completes the continuation."""
        if token in self._stop_tokens:
            return True
        return bool(self._stop_strings) and self._completes_a_string(token)

    def _completes_a_string(self, token: int) -> bool:
        self._pending.append(token)
        known = self._decode(self._context)
        new = self._decode([*self._context, *self._pending])[len(known) :]
        whole = not new.endswith("\ufffd") or len(self._pending) > _PATIENCE
        text = self._text + (new if whole else new.rstrip("\ufffd"))
        if whole:
            self._context, self._pending = self._pending, []
            self._text = text[-self._reach :] if self._reach else ""
        return any(stop in text for stop in self._stop_strings)

    def _decode(self, tokens: list[int]) -> str:
        return self._decoder.decode(
            tokens, skip_special_tokens=False, clean_up_tokenization_spaces=False
        )
