"""Processes that hold one trainer together, for as long as a test session.

To import Megatron takes ten seconds and more: it is done once, by the process that all ranks are
forked from, and one group serves all tests.
"""

from __future__ import annotations

import multiprocessing
import os
import traceback
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist

Result = TypeVar("Result")

ROOT = Path(__file__).parents[2]
_WORK = "tests.megatron.work"
_LIMIT_S = 60.0


class Group:
    """`call` runs a function of `work.py` on every rank."""

    def __init__(self, num_ranks: int, folder: Path) -> None:
        os.environ["PYTHONPATH"] = str(ROOT)
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload([_WORK])
        self._pipes: list[Connection] = []
        self._processes = []
        for rank in range(num_ranks):
            here, there = context.Pipe()
            process = context.Process(
                target=_serve, args=(there, rank, num_ranks, folder / "store"), daemon=True
            )
            process.start()
            self._pipes.append(here)
            self._processes.append(process)

    def call(self, work: Callable[..., Result], *args: Any) -> list[Result]:
        """What it gives on each rank. Raises what went wrong on the first that failed."""
        for pipe in self._pipes:
            pipe.send((work, args))
        answers = [self._answer(rank) for rank in range(len(self._pipes))]
        problems = [f"rank {i}:\n{problem}" for i, (_, problem) in enumerate(answers) if problem]
        if problems:
            raise AssertionError("\n".join(problems))
        return [result for result, _ in answers]

    def _answer(self, rank: int) -> tuple[Any, str | None]:
        if not self._pipes[rank].poll(_LIMIT_S):
            return None, "no answer"
        return self._pipes[rank].recv()

    def close(self) -> None:
        for process in self._processes:
            process.kill()
            process.join()


def _serve(pipe: Connection, rank: int, num_ranks: int, store: Path) -> None:
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{store}", rank=rank, world_size=num_ranks
    )
    while True:
        work, args = pipe.recv()
        try:
            answer = work(*args), None
        except Exception:  # noqa: BLE001 - the test shall see it
            answer = None, traceback.format_exc()
        pipe.send(answer)


def every(results: Sequence[Result]) -> Result:
    """What all ranks gave, which must be the same."""
    assert all(result == results[0] for result in results)
    return results[0]
