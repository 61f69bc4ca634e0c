"""A `SamplingEngine` over vLLM replicas. Imports neither torch nor vLLM."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncGenerator, Generator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace

from backends.contract import (
    BackendError,
    Failure,
    PauseMode,
    ReplicaStatus,
    SampleDelta,
    SampleRequest,
    SampleResult,
)
from backends.sampling.requests import CANCELLED
from backends.sampling.vllm import translate
from backends.sampling.vllm.attempt import Attempt, OnDelta
from backends.sampling.vllm.delivered import Delivered
from backends.sampling.vllm.errors import Refused, ReplicaLost, RequestFailed
from backends.sampling.vllm.fleet import Fleet
from backends.sampling.vllm.model_facts import ModelFacts
from backends.sampling.vllm.replica import Replica
from backends.sampling.vllm.translate import Limits
from backends.workers.backlog import Backlog

Outcome = SampleResult | Failure

_ATTEMPTS = 2
"""A request that a replica takes down with it is tried once elsewhere, no more."""


@dataclass(eq=False)
class _Asked:
    """A request while the engine has it."""

    request: SampleRequest
    """With the newest weights that have been saved for it: what begins, or begins again, begins
    with those."""


class VllmEngine:
    """Requests of any adapters at once, each on one replica with all of its samples."""

    def __init__(self, fleet: Fleet, facts: ModelFacts, limits: Limits) -> None:
        self.fleet = fleet
        self._facts = facts
        self._limits = limits
        self._running: dict[str, asyncio.Task[Outcome]] = {}
        self._asked: set[_Asked] = set()
        self._places: dict[str, Replica] = {}
        """Of each request that a replica has."""

    async def start(self) -> None:
        await self.fleet.start()

    async def stop(self) -> None:
        await self.fleet.stop()

    async def sample(self, request: SampleRequest) -> Outcome:
        """A caller that is cancelled cancels the request. Raises BackendError when two replicas
        in a row were lost with it."""
        task = self._begin(request, None)
        try:
            await asyncio.wait([task])
        finally:
            await _end(task)
        return _outcome(task)

    async def stream(self, request: SampleRequest) -> AsyncGenerator[SampleDelta | Outcome]:
        backlog = Backlog()
        task = self._begin(request, lambda delta: backlog.add([delta]))
        task.add_done_callback(lambda _: backlog.wake())
        try:
            over = False
            while not over:
                await backlog.wait()
                over = task.done()
                for delta in backlog.take():
                    yield delta
            yield _outcome(task)
        finally:
            await _end(task)

    async def cancel(self, request_id: str) -> None:
        task = self._running.get(request_id)
        if task is not None:
            task.cancel()

    async def update(self, old: str, new: str) -> None:
        """On all replicas; what one of them cannot do is done on the others."""
        for asked in self._asked:
            if asked.request.adapter == old:
                asked.request = replace(asked.request, adapter=new)
        await self.fleet.update(old, new)

    def replicas(self) -> list[ReplicaStatus]:
        return [replica.status for replica in self.fleet.replicas]

    async def pause(self, replica: str, mode: PauseMode) -> None:
        await self.fleet.replica(replica).pause(mode)

    async def drain(self, replica: str) -> None:
        await self.fleet.replica(replica).drain()

    async def resume(self, replica: str) -> None:
        await self.fleet.resume(replica)

    def held_up(self, request_id: str) -> str | None:
        replica = self._places.get(request_id)
        if replica is None:
            return self.fleet.closed()
        return f"{replica.name} is paused" if replica.frozen else None

    def frozen_samples(self) -> int:
        return sum(replica.load for replica in self.fleet.replicas if replica.frozen)

    def _begin(self, request: SampleRequest, on_delta: OnDelta | None) -> asyncio.Task[Outcome]:
        asked = _Asked(request)
        task = asyncio.create_task(self._run(asked, on_delta))
        self._running[request.request_id] = task
        self._asked.add(asked)

        def forget(done: asyncio.Task[Outcome]) -> None:
            self._asked.discard(asked)
            if self._running.get(request.request_id) is done:
                del self._running[request.request_id]

        task.add_done_callback(forget)
        return task

    async def _run(self, asked: _Asked, on_delta: OnDelta | None) -> Outcome:
        try:
            translate.check(asked.request, self._facts)
            return await self._attempts(asked, on_delta)
        except RequestFailed as failed:
            return failed.failure
        except Refused as refused:
            return refused.failure()

    async def _attempts(self, asked: _Asked, on_delta: OnDelta | None) -> SampleResult:
        """What needs the same numbers more than once gets a seed, if it brought none: a stream may
        have to be repeated, alternatives are drawn in many calls."""
        seed = asked.request.seed
        if seed is None and (on_delta is not None or translate.draws_alternatives(asked.request)):
            seed = secrets.randbits(64)
        delivered = None if on_delta is None else Delivered(on_delta)
        lost: set[str] = set()
        reasons: list[str] = []
        while len(reasons) < _ATTEMPTS:
            replica = await self.fleet.pick(asked.request, lost)
            interruptions = replica.interruptions
            if delivered is not None:
                delivered.again()
            try:
                return await self._on(replica, asked, seed, delivered)
            except ReplicaLost as error:
                if replica.interruptions > interruptions:
                    continue
                lost.add(replica.name)
                reasons.append(str(error))
                replica.lost_requests += 1
                await replica.report_lost()
        raise BackendError(f"request {asked.request.request_id} was lost twice: {reasons}")

    async def _on(
        self, replica: Replica, asked: _Asked, seed: int | None, delivered: Delivered | None
    ) -> SampleResult:
        """On this replica; an adapter that it turns out not to hold is loaded again, once."""
        request = asked.request
        with replica.loaded(request.num_samples), self._placed(request, replica):
            try:
                return await self._held(replica, request, seed, delivered)
            except Refused as refused:
                if refused.status != 404 or request.adapter is None:
                    raise
            replica.adapters.forget(request.adapter)
            return await self._held(replica, asked.request, seed, delivered)

    @contextmanager
    def _placed(self, request: SampleRequest, replica: Replica) -> Generator[None]:
        self._places[request.request_id] = replica
        try:
            yield
        finally:
            del self._places[request.request_id]

    async def _held(
        self,
        replica: Replica,
        request: SampleRequest,
        seed: int | None,
        delivered: Delivered | None,
    ) -> SampleResult:
        async with replica.adapters.hold(request.adapter) as model:
            attempt = Attempt(
                request=request,
                facts=self._facts,
                limits=self._limits,
                seed=seed,
                client=replica.client,
                model=model,
                on_delta=None if delivered is None else delivered.add,
            )
            return await attempt.run()


async def _end(task: asyncio.Task[Outcome]) -> None:
    """Whoever asked has left: stop generating."""
    if not task.done():
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task


def _outcome(task: asyncio.Task[Outcome]) -> Outcome:
    return CANCELLED if task.cancelled() else task.result()
