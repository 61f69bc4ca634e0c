"""Virtual time, and processes that live in it as generators."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from itertools import count


@dataclass(frozen=True, slots=True)
class Sleep:
    seconds: float


@dataclass(frozen=True, slots=True)
class Until:
    """Begins something; the process goes on when that calls what it was given."""

    begin: Callable[[Callable[[], None]], None]


@dataclass(frozen=True, slots=True)
class Together:
    """The process goes on when all of these have ended."""

    processes: Sequence[Process]


Process = Generator[Sleep | Until | Together]


class Clock:
    def __init__(self) -> None:
        self.now_s = 0.0
        self._due: list[tuple[float, int, Callable[[], None]]] = []
        self._order = count()

    def at(self, when_s: float, act: Callable[[], None]) -> None:
        """What is due at one moment happens in the order it was asked for."""
        heapq.heappush(self._due, (when_s, next(self._order), act))

    def start(self, process: Process, ended: Callable[[], None] = lambda: None) -> None:
        self.at(self.now_s, lambda: self._go_on(process, ended))

    def run(self, until_s: float = float("inf")) -> None:
        while self._due and self._due[0][0] <= until_s:
            self.now_s, _, act = heapq.heappop(self._due)
            act()

    def _go_on(self, process: Process, ended: Callable[[], None]) -> None:
        def go_on() -> None:
            self._go_on(process, ended)

        match next(process, None):
            case Sleep(seconds):
                self.at(self.now_s + seconds, go_on)
            case Until(begin):
                begin(go_on)
            case Together(processes):
                self._join(processes, go_on)
            case None:
                ended()

    def _join(self, processes: Sequence[Process], ended: Callable[[], None]) -> None:
        running = len(processes)

        def one_ended() -> None:
            nonlocal running
            running -= 1
            if not running:
                ended()

        for process in processes:
            self.start(process, one_ended)
