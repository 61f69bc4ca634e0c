"""The replicas of one base model: which of them a request goes to, and waiting for one."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Collection, Sequence

from backends.contract import BackendError, SampleRequest
from backends.sampling.vllm.replica import Replica
from backends.sampling.vllm.routing import Choose, RoutedRequest

_MAX_SESSIONS = 100_000
"""Sessions whose replica is remembered."""


class Fleet:
    def __init__(self, replicas: Sequence[Replica], choose: Choose) -> None:
        self.replicas = tuple(replicas)
        self._choose = choose
        self._sessions: OrderedDict[str, str] = OrderedDict()
        """By session, the replica it has used last."""
        self._changed = asyncio.Event()
        self._supervisors: list[asyncio.Task[None]] = []
        self._stopped = False

    async def start(self) -> None:
        """Returns when every replica is ready. Raises BackendError when one cannot be had."""
        try:
            async with asyncio.TaskGroup() as group:
                for replica in self.replicas:
                    group.create_task(replica.start())
        except ExceptionGroup as errors:
            await self.stop()
            raise BackendError(str(errors.exceptions[0])) from errors
        for replica in self.replicas:
            supervisor = asyncio.create_task(replica.supervise(self._changed.set))
            self._supervisors.append(supervisor)

    async def stop(self) -> None:
        self._stopped = True
        self._changed.set()
        for supervisor in self._supervisors:
            supervisor.cancel()
        await asyncio.gather(*self._supervisors, return_exceptions=True)
        await asyncio.gather(*(replica.stop() for replica in self.replicas))

    async def update(self, old: str, new: str) -> None:
        """Raises what the first replica raised that could not, once all are through."""
        updates = (replica.update(old, new) for replica in self.replicas)
        for failed in await asyncio.gather(*updates, return_exceptions=True):
            if failed is not None:
                raise failed

    def replica(self, name: str) -> Replica:
        """Raises KeyError."""
        return {replica.name: replica for replica in self.replicas}[name]

    async def resume(self, name: str) -> None:
        await self.replica(name).resume()
        self._changed.set()

    def closed(self) -> str | None:
        """Why no request can be sent, if none can."""
        if any(replica.open for replica in self.replicas):
            return None
        if any(replica.ready for replica in self.replicas):
            return "the sampling replicas are paused"
        return "the sampling replicas are starting"

    async def pick(self, request: SampleRequest, avoid: Collection[str]) -> Replica:
        """The replica for a request; waits while none is open. Those in `avoid` have lost it
        before and are taken only when nothing else is left. Raises BackendError when stopped."""
        candidates = await self._candidates()
        fresh = [replica for replica in candidates if replica.name not in avoid] or candidates
        session = request.session
        routed = RoutedRequest(
            adapter=request.adapter,
            session=session or request.request_id,
            stuck_to=self._sessions.get(session),
        )
        name = self._choose([replica.view for replica in fresh], routed)
        if session:
            self._remember(session, name)
        return next(replica for replica in fresh if replica.name == name)

    async def _candidates(self) -> list[Replica]:
        while True:
            if self._stopped:
                raise BackendError("the sampling replicas were stopped")
            candidates = [replica for replica in self.replicas if replica.open]
            if candidates:
                return candidates
            self._changed.clear()
            await self._changed.wait()

    def _remember(self, session: str, name: str) -> None:
        self._sessions[session] = name
        self._sessions.move_to_end(session)
        if len(self._sessions) > _MAX_SESSIONS:
            self._sessions.popitem(last=False)
