"""The trainer groups of one base model: which run goes to which, and when one moves.

A run belongs to the group that holds its tensors, or work of it. It is placed (`core/placement.py`)
when it has work and no group: when it is new, when it comes back from disk, when its group has died
or is drained. It is moved, between two of its requests, when its group is drained, when an operator
says so, and when another group has much less to do for a while. The way there is that of any run
which is not in memory: its snapshot, then the journal.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import structlog

from backends.contract import BackendError
from server.core.ids import RequestId, RunId
from server.core.placement import Group, Load, load_of, placed, relief
from server.dispatch.device import Restartable
from server.dispatch.dispatcher import Dispatcher
from server.runs.registry import LiveRun, Registry

log = structlog.get_logger()

TEND_S = 1.0
LOPSIDED_S = 10.0
"""How long one group must have had more runs with work than another before one of them moves."""


@dataclass(slots=True, kw_only=True)
class Trainer:
    """One trainer group."""

    name: str
    backend: Restartable
    dispatcher: Dispatcher
    draining: bool = False
    """It takes no runs, and those that it has leave."""
    arrivals: int = 0
    """Runs that came from another group."""
    revival: asyncio.Task[None] | None = None

    def takes_runs(self) -> bool:
        return self.backend.alive and not self.draining


class Pool:
    """The groups come with `add`; what goes on by itself begins with `tend`."""

    def __init__(self, base_model: str, registry: Registry, clock: Callable[[], float]) -> None:
        self.base_model = base_model
        self._registry = registry
        self._clock = clock
        self._trainers: dict[str, Trainer] = {}
        self._moves: dict[RunId, asyncio.Task[None]] = {}
        self._lopsided_since: float | None = None
        self.attempts: dict[RequestId, int] = {}

    def add(self, trainer: Trainer) -> None:
        self._trainers[trainer.name] = trainer

    @property
    def trainers(self) -> list[Trainer]:
        return list(self._trainers.values())

    def runs(self, trainer: Trainer) -> list[LiveRun]:
        """Those that belong to it."""
        return self._registry.members(trainer.name)

    # ------------------------------------------------------------ placing

    def wake(self, live: LiveRun) -> None:
        """The run has something to do."""
        if live.pending and self._is_astray(live):
            self._place([live])
        elif live.trainer is not None:
            self._trainers[live.trainer].dispatcher.wake()

    def left(self, live: LiveRun) -> None:
        """It was put away; work may have come for it meanwhile."""
        if live.pending:
            self._place([live])

    def elsewhere(self, trainer: str) -> bool:
        return any(one.takes_runs() for one in self._trainers.values() if one.name != trainer)

    def rescue(self, trainer: str) -> None:
        """Its backend is dead: what waits there goes to others at once."""
        dispatcher = self._trainers[trainer].dispatcher
        dispatcher.abandon()
        stranded = [live for live in self._busy(trainer) if not dispatcher.has(live)]
        for live in stranded:
            dispatcher.forget(live)
        if stranded:
            log.warning("runs_go_elsewhere", trainer=trainer, runs=len(stranded))
            self._place(stranded, moved=True)

    def _busy(self, trainer: str | None) -> list[LiveRun]:
        return list(self._registry.busy(self.base_model, trainer))

    def _is_astray(self, live: LiveRun) -> bool:
        """Whether it should be placed: it has no group, or nothing holds it to one that is lost."""
        if live.trainer is None:
            return True
        trainer = self._trainers[live.trainer]
        stays = trainer.takes_runs() or trainer.dispatcher.has(live)
        return not stays and self.elsewhere(trainer.name)

    def _place(self, lives: Iterable[LiveRun], *, moved: bool = False) -> None:
        """Runs that have work; where no group takes any, they wait."""
        by_id = {live.run.id: live for live in lives}
        chosen = placed(list(by_id), self._groups())
        for id_, live in by_id.items():
            self._registry.assign(live, None)
            if name := chosen.get(id_):
                self._assign(live, self._trainers[name], moved=moved)

    def _assign(self, live: LiveRun, trainer: Trainer, *, moved: bool) -> None:
        self._registry.assign(live, trainer.name)
        trainer.arrivals += moved
        trainer.dispatcher.wake()

    def _groups(self) -> list[Group]:
        return [
            Group(
                name=one.name,
                load=self._load(one),
                alive=one.backend.alive,
                open=not one.draining,
            )
            for one in self._trainers.values()
        ]

    def _load(self, trainer: Trainer) -> Load:
        if len(self._trainers) == 1:
            return Load()  # there is nothing to compare it with, and runs may be many
        now = self._clock()
        return load_of(
            (bool(live.pending), now - live.run.last_request_at) for live in self.runs(trainer)
        )

    # ------------------------------------------------------------ moving

    def drain(self, trainer: Trainer) -> None:
        trainer.draining = True
        self._empty(trainer)

    def resume(self, trainer: Trainer) -> None:
        trainer.draining = False
        self._place(self._busy(None))

    def other(self, live: LiveRun) -> Trainer | None:
        """The least loaded group that the run does not belong to."""
        groups = [group for group in self._groups() if group.name != live.trainer]
        name = placed([live.run.id], groups).get(live.run.id)
        return None if name is None else self._trainers[name]

    def is_moving(self, live: LiveRun) -> bool:
        return live.run.id in self._moves

    def move(self, live: LiveRun, to: Trainer | None = None) -> None:
        """To that group, or the one that is least loaded when it comes. A run that moves already
        goes on."""
        if not self.is_moving(live):
            self._moves[live.run.id] = asyncio.create_task(self._move(live, to))

    async def _move(self, live: LiveRun, to: Trainer | None) -> None:
        try:
            source = live.trainer
            if source is not None:
                await self._trainers[source].dispatcher.send_away(live)
            if to is not None and to.takes_runs():
                self._assign(live, to, moved=True)
            elif live.pending:
                self._place([live], moved=True)
            log.info("run_moved", run=live.run.id, source=source, target=live.trainer)
        finally:
            del self._moves[live.run.id]

    def _empty(self, trainer: Trainer) -> None:
        """Those that have nothing in memory go at once, the others as soon as they can."""
        for live in self.runs(trainer):
            if trainer.dispatcher.has(live):
                self.move(live)
            else:
                trainer.dispatcher.forget(live)
                self.left(live)

    # ------------------------------------------------------------ what goes on by itself

    async def tend(self) -> None:
        """Until cancelled: groups that died are started again, nobody waits for them who can go
        elsewhere, and who has much to do is relieved."""
        while len(self._trainers) > 1:
            await asyncio.sleep(TEND_S)
            for trainer in self.trainers:
                if not trainer.backend.alive:
                    self._revive(trainer)
                if trainer.draining:
                    self._empty(trainer)
            self.relieve()

    async def stop(self) -> None:
        """What is on its way stays where it is: the journal leads to it."""
        revivals = [one.revival for one in self.trainers if one.revival is not None]
        tasks = [*self._moves.values(), *revivals]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def relieve(self) -> None:
        """Have a run move once there has been reason for it all the time."""
        if self._moves:
            return
        way, now = relief(self._groups()), self._clock()
        if way is None:
            self._lopsided_since = None
        elif self._lopsided_since is None:
            self._lopsided_since = now
        elif now - self._lopsided_since >= LOPSIDED_S:
            source, target = (self._trainers[name] for name in way)
            self.move(self._easiest(source), target)

    def _easiest(self, trainer: Trainer) -> LiveRun:
        """Of the runs that work waits for: one that is not in memory yet, then the one that has
        most before it."""
        return min(
            self._busy(trainer.name),
            key=lambda live: (trainer.dispatcher.has(live), -len(live.pending)),
        )

    def _revive(self, trainer: Trainer) -> None:
        if trainer.revival is None:
            trainer.revival = asyncio.create_task(self._start_again(trainer))
        if self.elsewhere(trainer.name):
            self.rescue(trainer.name)
        else:
            trainer.dispatcher.wake()

    async def _start_again(self, trainer: Trainer) -> None:
        try:
            await trainer.backend.describe()
        except BackendError as error:
            log.warning("trainer_not_started", trainer=trainer.name, why=str(error))
        finally:
            trainer.revival = None
            trainer.dispatcher.wake()
