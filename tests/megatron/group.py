"""Processes that hold one trainer together, for as long as it is wanted.

To import Megatron takes seconds: it is done once, by the process that all ranks are forked from.
"""

from __future__ import annotations

import importlib
import multiprocessing
import os
import tempfile
import traceback
from collections.abc import Sequence
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import torch

_ROOT = Path(__file__).parents[2]
_WORK = "tests.megatron.work"
_LIMIT_S = 120.0
_BEGINNINGS = ("start", "not_started")
"""They are made by new ranks: a group of gloo's never gives back its threads, of which a layout has
dozens, and each wakes a hundred times a second."""


class Group:
    """`call` runs a function of `work.py`, given by its name, on every rank."""

    def __init__(self, num_ranks: int, folder: Path) -> None:
        self._num_ranks = num_ranks
        self._folder = folder
        self._pipes: list[Connection] = []
        self._processes: list[BaseProcess] = []

    def _start(self) -> None:
        os.environ |= {"PYTHONPATH": str(_ROOT), "GLOO_SOCKET_IFNAME": "lo"}
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload([_WORK])
        store = Path(tempfile.mkdtemp(dir=self._folder))
        for rank in range(self._num_ranks):
            here, there = context.Pipe()
            args = (there, rank, self._num_ranks, store)
            process = context.Process(target=_serve, args=args, daemon=True)
            process.start()
            self._pipes.append(here)
            self._processes.append(process)

    def call(self, work: str, *args: Any) -> list[Any]:
        """What it gives on each rank. Raises what went wrong on those that failed, after which
        the next call finds a new group."""
        if work in _BEGINNINGS:
            self.close()
        if not self._pipes:
            self._start()
        for pipe in self._pipes:
            pipe.send((work, args))
        answers: dict[int, Any] = {}
        problems: list[str] = []
        while len(answers) < self._num_ranks and not problems:
            ready = wait([p for i, p in enumerate(self._pipes) if i not in answers], _LIMIT_S)
            for pipe in ready:
                rank = self._pipes.index(pipe)
                answers[rank], problem = pipe.recv()
                problems += [f"rank {rank}:\n{problem}"] if problem else []
            problems += [] if ready else ["no answer"]
        if problems:
            self.close()
            raise AssertionError("\n".join(problems))
        return [answers[rank] for rank in range(self._num_ranks)]

    def close(self) -> None:
        for process in self._processes:
            process.kill()
            process.join()
        self._pipes, self._processes = [], []


def _serve(pipe: Connection, rank: int, num_ranks: int, store: Path) -> None:
    work = importlib.import_module(_WORK)
    torch.set_num_threads(1)
    work.join(store, rank, num_ranks)
    while True:
        name, args = pipe.recv()
        try:
            answer = getattr(work, name)(*args), None
        except Exception:  # noqa: BLE001 - the test shows it
            answer = None, traceback.format_exc()
        pipe.send(answer)


def first(results: Sequence[Any]) -> Any:
    """Of what all ranks gave, which must not differ."""
    assert all(repr(result) == repr(results[0]) for result in results)
    return results[0]
