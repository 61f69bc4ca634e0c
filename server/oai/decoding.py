"""Tokens to text while they are generated: nothing is shown that the next token could change."""

from __future__ import annotations

from collections.abc import Callable, Set

_UNSURE = 3
"""A character has up to four bytes, so up to this many marks may still become one character."""
_LONGEST = 32
"""More tokens than this without a whole character at the end are no text; it is cut somewhere."""
_KEPT = 16


class TextStream:
    """Decodes a window of the last few tokens, so a token costs the same however long the text.

    What one gets in the end is what decoding all tokens at once gives; with a decoder that spells
    bytes as tokens (`<0xE2>`) that holds for whatever is valid text."""

    def __init__(self, decode: Callable[[list[int]], str], skipped: Set[int]) -> None:
        self._decode = decode
        self._skipped = skipped
        self._window: list[int] = []
        self._clean = 0
        """So many tokens of the window are shown; they are there because what a token looks like
        can depend on the one before."""
        self._seen = ""
        """What is shown of the window's text."""

    def push(self, token: int) -> str:
        """What can be shown now."""
        if token in self._skipped:
            return ""
        self._window.append(token)
        text = self._decode(self._window)
        unsure = _marks_at_end(text)
        full = len(self._window) > _LONGEST
        if not full and not text.startswith(self._seen):
            # A byte that spoils those before it, until its character is whole.
            return ""
        fresh = text[len(self._seen) : len(text) - unsure]
        self._seen = text[: len(self._seen) + len(fresh)]
        if not unsure:
            self._forget(self._clean, hidden=0)
            self._clean = len(self._window)
        elif full:
            self._clean = 0
            self._forget(len(self._window) - _KEPT, hidden=len(text) - len(self._seen))
        return fresh

    def flush(self) -> str:
        """What was held back; no more tokens come."""
        return self._decode(self._window)[len(self._seen) :]

    def _forget(self, count: int, hidden: int) -> None:
        if count:
            del self._window[:count]
            text = self._decode(self._window)
            self._seen = text[: max(0, len(text) - hidden)]


def _marks_at_end(text: str) -> int:
    marks = len(text) - len(text.rstrip("\ufffd"))
    return min(marks, _UNSURE)
