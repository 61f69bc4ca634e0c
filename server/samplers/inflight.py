"""In-flight weights: a sample begins with the newest that its run has saved by then, and what
becomes of it when newer ones are saved is a setting."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Awaitable, Callable, Mapping
from typing import Literal, TypeVar

import structlog

from backends.contract import BackendError, SamplingEngine
from server.checkpoints.storage import Storage
from server.core.ids import RunId
from server.core.records import Run
from server.runs.registry import Registry

log = structlog.get_logger()

Swap = Literal["keep", "wait", "abort"]
"""Samples under way go on with newer weights; finish with those they have; or start again."""

Result = TypeVar("Result")


class InflightWeights:
    def __init__(
        self,
        runs: Registry,
        storage: Storage,
        engines: Mapping[str, SamplingEngine],
        swap: Swap,
    ) -> None:
        self._runs = runs
        self._storage = storage
        self._engines = engines
        self._swap = swap
        self._asked: defaultdict[RunId, dict[asyncio.Task, set[str]]] = defaultdict(dict)
        """What is under way, by run, with every adapter that it has had so far: an engine may
        read any of them again."""
        self._outdated: set[asyncio.Task] = set()
        """Of these, what was ended because there are newer weights."""
        self._updates: set[asyncio.Task[None]] = set()
        runs.listen(self._saved)

    async def follow(self, run: RunId, ask: Callable[[str], Awaitable[Result]]) -> Result:
        """Gives what `ask` gives for the path of the run's newest weights."""
        while True:
            folder = (await self._runs.get(run, None)).run.inflight_folder
            assert folder is not None, "an inflight sampler is made by a save"
            adapter = self._storage.path(folder)
            asked = asyncio.ensure_future(ask(adapter))
            self._asked[run][asked] = {adapter}
            try:
                return await asked
            except asyncio.CancelledError:
                if asked not in self._outdated or _asked_to_end():
                    raise
            finally:
                self._outdated.discard(asked)
                del self._asked[run][asked]
                if not self._asked[run]:
                    del self._asked[run]

    def in_use(self) -> set[str]:
        """Adapters, by path, of what is under way."""
        running = (adapters for asked in self._asked.values() for adapters in asked.values())
        return set().union(*running)

    async def stop(self) -> None:
        """An update that was cut short has changed nothing that outlives the process."""
        for update in self._updates:
            update.cancel()
        await asyncio.gather(*self._updates, return_exceptions=True)

    def _saved(self, run: Run, folder: str) -> None:
        """The run, as it was until now, has newer weights."""
        if run.inflight_folder is None:
            return
        under_way = self._asked.get(run.id, {})
        match self._swap:
            case "keep":
                old, new = (self._storage.path(one) for one in (run.inflight_folder, folder))
                for adapters in under_way.values():
                    adapters.add(new)
                update = asyncio.create_task(self._update(run, old, new))
                self._updates.add(update)
                update.add_done_callback(self._updates.discard)
            case "abort":
                for asked in under_way:
                    self._outdated.add(asked)
                    asked.cancel()
            case "wait":
                pass

    async def _update(self, run: Run, old: str, new: str) -> None:
        try:
            await self._engines[run.base_model].update(old, new)
        except BackendError as error:
            log.warning("samples_keep_older_weights", run=run.id, why=str(error))


def _asked_to_end() -> bool:
    """Whether whoever waits here is cancelled itself, at the same time as what it waits for."""
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0
