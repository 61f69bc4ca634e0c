"""The way to a backend: one training call at a time.

So a death of the backend belongs to the call under way, and whoever waits for its turn waits for
one call of each of the others at most.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager
from typing import Protocol

from backends.contract import BackendError, TrainingBackend
from server.runs.registry import LiveRun, Residence


class Restartable(TrainingBackend, Protocol):
    """A backend that a supervisor starts again when it dies; the next call waits for it."""

    generation: int
    """Grows with every start: what was in memory before is gone."""

    @property
    def alive(self) -> bool: ...


class Lost(BackendError):
    """The backend was started again by somebody else, or is being started: what it held is gone,
    through no fault of the calls that find it so."""


class Device:
    """The backend of the trainer group `name`. While `elsewhere` says that other groups take its
    runs, nobody waits for one that is dead."""

    def __init__(self, name: str, backend: Restartable, elsewhere: Callable[[], bool]) -> None:
        self.name = name
        self.backend = backend
        self._elsewhere = elsewhere
        self._turns = asyncio.Lock()

    def holds(self, live: LiveRun) -> bool:
        """Whether the run's tensors are in memory."""
        return self.backend.alive and live.resident_in == self._here

    @property
    def given_up(self) -> bool:
        return not self.backend.alive and self._elsewhere()

    @property
    def _here(self) -> Residence:
        return self.name, self.backend.generation

    @asynccontextmanager
    async def turn(self) -> AsyncGenerator[Residence]:
        """A turn at the backend, which is started first if it is dead: yields where the calls go
        to. Raises Lost at the end when they may have gone to another generation, and at once when
        it is dead and given up."""
        async with self._turns:
            if self.given_up:
                raise Lost("it died, and its runs go elsewhere")
            if not self.backend.alive:
                await self.backend.describe()
            here = self._here
            yield here
            if self._here != here:
                raise Lost("it was started again during the call")
