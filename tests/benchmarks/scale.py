"""How much is measured."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

MODEL_NAME = "HuggingFaceTB/SmolLM2-135M-Instruct"


@dataclass(frozen=True, slots=True, kw_only=True)
class Scale:
    model: Path
    """The folder of SmolLM2-135M-Instruct."""
    threads: int
    """Of the workers, where the whole service is measured; single passes run on one."""
    rounds: int
    """Of each ratio."""
    requests: int
    """Of a few milliseconds each, where latencies are measured."""
    flooded_steps: int
    """Of the small tenant, alone and beside the flood."""
    service_runs: int
    """Live runs on one server."""


def full(model: Path, threads: int) -> Scale:
    return Scale(
        model=model,
        threads=threads,
        rounds=7,
        requests=300,
        flooded_steps=20,
        service_runs=1000,
    )


def quick(model: Path, threads: int) -> Scale:
    return Scale(
        model=model,
        threads=threads,
        rounds=3,
        requests=100,
        flooded_steps=6,
        service_runs=100,
    )
