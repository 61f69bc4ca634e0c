"""How a ratio is measured: both sides in turn, round after round, so that whatever else the
machine does meets both alike. Everything is in seconds."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Ratio:
    """Median over median, with the lowest and the highest ratio of a single round."""

    value: float
    low: float
    high: float


def in_turn(sides: Sequence[Callable[[], float]], rounds: int) -> list[list[float]]:
    """Let each side measure itself once a round; a list of `rounds` figures a side. One more
    round goes before, to warm up."""
    taken: list[list[float]] = [[] for _ in sides]
    for _ in range(rounds + 1):
        for side, figures in zip(sides, taken, strict=True):
            figures.append(side())
    return [figures[1:] for figures in taken]


def ratio(over: Sequence[float], under: Sequence[float]) -> Ratio:
    """Of figures that were taken in the same rounds."""
    rounds = [a / b for a, b in zip(over, under, strict=True)]
    return Ratio(statistics.median(over) / statistics.median(under), min(rounds), max(rounds))


def percentile(figures: Sequence[float], share: float) -> float:
    """The smallest figure that at least `share` of all do not exceed."""
    return sorted(figures)[math.ceil(share * len(figures)) - 1]


def wall_seconds(call: Callable[[], object]) -> float:
    began = time.perf_counter()
    call()
    return time.perf_counter() - began


def processor_seconds(call: Callable[[], object]) -> float:
    """Of all threads of this process: neighbours on the machine do not count."""
    began = time.process_time()
    call()
    return time.process_time() - began
