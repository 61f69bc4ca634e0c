"""The trainer groups of all base models, as the service and its operators know them: each has its
own name."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from backends.contract import MemoryReport
from server.checkpoints.service import Checkpoints
from server.core.errors import BadInput, NotFound, Unavailable
from server.core.ids import RunId
from server.core.records import Run
from server.dispatch.choosing import DispatchSettings
from server.dispatch.device import Restartable
from server.dispatch.dispatcher import Dispatcher
from server.dispatch.pool import Pool, Trainer
from server.dispatch.recording import Recorder
from server.runs.registry import LiveRun, Registry
from server.store.ledger import Ledger

TrainerState = Literal["ready", "draining", "drained", "lost"]


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainerStatus:
    name: str
    model: str
    state: TrainerState
    runs: tuple[RunId, ...]
    """Those that belong to it."""
    waiting: int
    """Requests of theirs without an outcome."""
    arrivals: int
    """Runs that came from another group."""
    generation: int
    """How often it has become ready: every start but the first is a restart."""
    ticks: int
    tokens: int
    """What went through the model in them."""


class Trainers:
    def __init__(
        self,
        backends: Mapping[str, Sequence[Restartable]],
        *,
        registry: Registry,
        checkpoints: Checkpoints,
        ledger: Ledger,
        settings: DispatchSettings,
        clock: Callable[[], float],
    ) -> None:
        """`backends` of each base model, one a group."""
        self._registry = registry
        self._changed = ledger.wake_all
        self._loops: list[asyncio.Task[None]] = []
        self._tending: list[asyncio.Task[None]] = []
        self._pools: dict[str, Pool] = {}
        recorder = Recorder(registry, ledger, checkpoints)
        names = (f"trainer-{number}" for number in range(sum(map(len, backends.values()))))
        for model, groups in backends.items():
            pool = self._pools[model] = Pool(model, registry, clock)
            for backend, name in zip(groups, names, strict=False):
                dispatcher = Dispatcher(
                    name=name,
                    base_model=model,
                    backend=backend,
                    registry=registry,
                    checkpoints=checkpoints,
                    ledger=ledger,
                    recorder=recorder,
                    surroundings=pool,
                    settings=settings,
                    clock=clock,
                )
                pool.add(Trainer(name=name, backend=backend, dispatcher=dispatcher))

    @property
    def all(self) -> list[tuple[Pool, Trainer]]:
        return [(pool, one) for pool in self._pools.values() for one in pool.trainers]

    # ------------------------------------------------------------ what the service does

    def start(self) -> None:
        self._loops = [asyncio.create_task(one.dispatcher.run()) for _, one in self.all]
        self._tending = [asyncio.create_task(pool.tend()) for pool in self._pools.values()]

    async def finish(self, grace_s: float) -> None:
        """Take up nothing new, and put every run's state on disk."""
        for task in self._tending:
            task.cancel()
        await asyncio.gather(*self._tending, return_exceptions=True)
        await asyncio.gather(*(pool.stop() for pool in self._pools.values()))
        for _, trainer in self.all:
            trainer.dispatcher.stop()
        if self._loops:
            await asyncio.wait(self._loops, timeout=grace_s)

    async def stop(self) -> None:
        """Whatever has not finished by now."""
        for task in self._loops:
            task.cancel()
        await asyncio.gather(*self._loops, return_exceptions=True)

    def wake(self, live: LiveRun) -> None:
        """The run has something to do."""
        self._pools[live.run.base_model].wake(live)

    def release(self, run: Run) -> None:
        """Its session is over. A run of a model that is not served any more has nothing to free."""
        if pool := self._pools.get(run.base_model):
            for trainer in pool.trainers:
                trainer.dispatcher.release([run.id])

    def hold(self, on: bool) -> None:
        """Have nothing new begin, or have it begin again."""
        for _, trainer in self.all:
            if on:
                trainer.dispatcher.hold()
            else:
                trainer.dispatcher.let_go()

    # ------------------------------------------------------------ what operators ask

    async def memory(self) -> Mapping[str, MemoryReport]:
        """Of every group that is alive."""
        return {one.name: await one.backend.memory() for _, one in self.all if one.backend.alive}

    def statuses(self) -> Iterator[TrainerStatus]:
        for pool, trainer in self.all:
            runs = pool.runs(trainer)
            yield TrainerStatus(
                name=trainer.name,
                model=pool.base_model,
                state=_state(trainer, bool(runs)),
                runs=tuple(live.run.id for live in runs),
                waiting=sum(len(live.pending) for live in runs),
                arrivals=trainer.arrivals,
                generation=trainer.backend.generation,
                ticks=trainer.dispatcher.ticks,
                tokens=trainer.dispatcher.tokens,
            )

    def drain(self, name: str) -> None:
        """Its runs leave, each at the end of the request that it is in, and it takes none until
        `resume`. Raises NotFound."""
        pool, trainer = self._find(name)
        pool.drain(trainer)
        self._changed()

    def resume(self, name: str) -> None:
        """Raises NotFound."""
        pool, trainer = self._find(name)
        pool.resume(trainer)
        self._changed()

    async def move(self, run: RunId, name: str | None) -> str:
        """Have a run go to that group, or to the least loaded of the others, at the end of the
        request that it is in; returns which. Raises NotFound, BadInput, and Unavailable when it
        moves already or the group takes no runs."""
        live = await self._registry.get(run, None)
        pool = self._pools.get(live.run.base_model)
        if pool is None:
            raise Unavailable(f"base model {live.run.base_model!r} is not served")
        if pool.is_moving(live):
            raise Unavailable(f"run {run} is moving already")
        if name is None:
            target = pool.other(live)
            if target is None or not target.takes_runs():
                raise Unavailable(f"no other trainer of {pool.base_model} takes runs now")
        else:
            owner, target = self._find(name)
            if owner is not pool:
                raise BadInput(f"{name} trains {owner.base_model}; the run is of {pool.base_model}")
            if not target.takes_runs():
                raise Unavailable(f"{name} takes no runs: it is {_state(target, has_runs=True)}")
        pool.move(live, target)
        self._changed()
        return target.name

    def _find(self, name: str) -> tuple[Pool, Trainer]:
        for pool, trainer in self.all:
            if trainer.name == name:
                return pool, trainer
        known = ", ".join(trainer.name for _, trainer in self.all)
        raise NotFound(f"trainer {name[:100]!r} does not exist; there are: {known}")


def _state(trainer: Trainer, has_runs: bool) -> TrainerState:
    if not trainer.backend.alive:
        return "lost"
    if trainer.draining:
        return "draining" if has_runs else "drained"
    return "ready"
