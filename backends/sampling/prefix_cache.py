"""Prompts that were read stay readable: the longest common prefix of a later prompt is copied
instead of computed, and all keys and values together stay under one budget of tokens.

An entry belongs to one adapter folder (or the base model) and one cache namespace, and is never
seen from another.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import OrderedDict, defaultdict
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from backends.sampling.kv import PromptKV


class CacheKey(NamedTuple):
    adapter: str | None
    namespace: str


@dataclass(eq=False, slots=True)
class Entry:
    """Keys and values of `tokens`. Who works with an entry pins it; what nobody pins may go."""

    key: CacheKey
    tokens: np.ndarray
    """int64[P]"""
    kv: PromptKV
    code: bytes
    """The tokens, so that bytes sort as tokens do."""
    pinned: bool = True
    published: bool = False


@dataclass(slots=True)
class PrefixCache:
    """Entries, and the tokens promised to decoding sequences, under one limit."""

    max_tokens: int
    _used: int = 0
    _entries: OrderedDict[Entry, None] = field(default_factory=OrderedDict)
    """Published ones, the least recently used first."""
    _sorted: dict[CacheKey, list[Entry]] = field(default_factory=lambda: defaultdict(list))
    """The same by `code`: whatever shares the longest prefix with some tokens stands right before
    or right after the place where they would be."""

    @property
    def free_tokens(self) -> int:
        return self.max_tokens - self._used

    def reserve(self, num_tokens: int) -> bool:
        """Promise room, if need be by forgetting entries; False changes nothing."""
        idle = [entry for entry in self._entries if not entry.pinned]
        if num_tokens > self.free_tokens + sum(len(entry.tokens) for entry in idle):
            return False
        for entry in idle:
            if num_tokens <= self.free_tokens:
                break
            self._forget(entry)
        self._used += num_tokens
        return True

    def release(self, num_tokens: int) -> None:
        """Give back room that was promised."""
        self._used -= num_tokens

    def open(self, key: CacheKey, tokens: np.ndarray) -> Entry:
        """A pinned entry still to be filled, in room that was reserved for it."""
        return Entry(key, tokens, PromptKV(len(tokens)), _code(tokens))

    def publish(self, entry: Entry) -> None:
        """Its keys and values are complete; a shorter one that it contains is of no more use."""
        other, shared = self.longest(entry.key, entry.tokens, len(entry.tokens))
        if other is not None and shared == len(other.tokens) and not other.pinned:
            self._forget(other)
        entry.published = True
        self._entries[entry] = None
        ordered = self._sorted[entry.key]
        ordered.insert(_place(ordered, entry.code), entry)

    def unpin(self, entry: Entry) -> None:
        """Nobody works with it any more; one that was never completed is dropped."""
        entry.pinned = False
        if not entry.published:
            self.release(len(entry.tokens))

    def longest(self, key: CacheKey, tokens: np.ndarray, limit: int) -> tuple[Entry | None, int]:
        """The entry that shares the longest prefix with `tokens`, and its length, at most
        `limit`. A prefix too short to be worth a copy counts too: copying is always cheaper."""
        best, length = None, 0
        ordered = self._sorted.get(key, [])
        place = _place(ordered, _code(tokens))
        for entry in ordered[max(place - 1, 0) : place + 1]:
            shared = min(common_prefix(entry.tokens, tokens), limit)
            if shared > length:
                best, length = entry, shared
        if best is not None:
            self._entries.move_to_end(best)
        return best, length

    def clear(self) -> None:
        """Forget everything, promises too."""
        self._entries.clear()
        self._sorted.clear()
        self._used = 0

    def _forget(self, entry: Entry) -> None:
        del self._entries[entry]
        ordered = self._sorted[entry.key]
        ordered.remove(entry)
        if not ordered:
            del self._sorted[entry.key]
        self._used -= len(entry.tokens)


def _code(tokens: np.ndarray) -> bytes:
    return tokens.astype(">u4").tobytes()


def _place(ordered: list[Entry], code: bytes) -> int:
    return bisect_left(ordered, code, key=lambda entry: entry.code)


def common_prefix(one: np.ndarray, other: np.ndarray) -> int:
    """How many first tokens two sequences share."""
    n = min(len(one), len(other))
    different = np.flatnonzero(one[:n] != other[:n])
    return int(different[0]) if len(different) else n
