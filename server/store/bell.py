"""Waking those who wait for a key, and forgetting keys that nobody waits for."""

from __future__ import annotations

import asyncio
from collections.abc import Generator, Hashable
from contextlib import contextmanager
from typing import Generic, TypeVar

Key = TypeVar("Key", bound=Hashable)


class Ring:
    def __init__(self) -> None:
        self._event = asyncio.Event()
        self.listeners = 0

    async def within(self, seconds: float) -> bool:
        """Wait for the ring; False when it did not come in time."""
        if seconds <= 0:
            return self._event.is_set()
        try:
            async with asyncio.timeout(seconds):
                await self._event.wait()
        except TimeoutError:
            return False
        return True

    def set(self) -> None:
        self._event.set()


class Bell(Generic[Key]):
    """Listen first, then look, then wait: a ring between looking and waiting is not lost."""

    def __init__(self) -> None:
        self._rings: dict[Key, Ring] = {}

    @contextmanager
    def listen(self, key: Key) -> Generator[Ring]:
        ring = self._rings.setdefault(key, Ring())
        ring.listeners += 1
        try:
            yield ring
        finally:
            ring.listeners -= 1
            if not ring.listeners and self._rings.get(key) is ring:
                del self._rings[key]

    def ring(self, key: Key) -> None:
        if ring := self._rings.pop(key, None):
            ring.set()

    def ring_all(self) -> None:
        for key in list(self._rings):
            self.ring(key)
