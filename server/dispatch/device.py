"""The way to a backend: one training call at a time.

So a death of the backend belongs to the call under way, and whoever waits for its turn waits for
one call of each of the others at most.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from typing import Protocol

from backends.contract import BackendError, TrainingBackend
from server.runs.registry import LiveRun


class Restartable(TrainingBackend, Protocol):
    """A backend that a supervisor starts again when it dies; the next call waits for it."""

    generation: int
    """Grows with every start: what was in memory before is gone."""

    @property
    def alive(self) -> bool: ...


class Lost(BackendError):
    """The backend was started again by somebody else: what it held is gone, through no fault of
    the calls that find it so."""


class Device:
    def __init__(self, backend: Restartable) -> None:
        self.backend = backend
        self._turns = asyncio.Lock()

    def holds(self, live: LiveRun) -> bool:
        """Whether the run's tensors are in memory."""
        return self.backend.alive and live.resident_in == self.backend.generation

    @asynccontextmanager
    async def turn(self) -> AsyncGenerator[int]:
        """A turn at the backend, which is started first if it is dead: yields the generation that
        calls go to. Raises Lost at the end when they may have gone to another one."""
        async with self._turns:
            if not self.backend.alive:
                await self.backend.describe()
            generation = self.backend.generation
            yield generation
            if self.backend.generation != generation:
                raise Lost("it was started again during the call")
