"""One replica of the fleet: found or started, warmed up, watched, and started again."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Generator
from contextlib import asynccontextmanager, contextmanager, nullcontext, suppress
from pathlib import Path
from typing import Protocol

import structlog

from backends.contract import BackendError, PauseMode, ReplicaState, ReplicaStatus
from backends.sampling.vllm.adapters import BASE, ReplicaAdapters
from backends.sampling.vllm.client import ReplicaClient
from backends.sampling.vllm.errors import Refused, ReplicaLost, RequestFailed
from backends.sampling.vllm.routing import ReplicaView

log = structlog.get_logger()

_FIRST_DELAY_S = 0.5
_LONGEST_DELAY_S = 30.0
_LONG_LIFE_S = 60.0
"""A replica that lived for so long starts again without a growing pause."""


class Host(Protocol):
    """A vLLM server."""

    url: str

    async def wait_gone(self) -> str:
        """Returns why, when it serves no more."""
        ...

    async def stop(self) -> None: ...


class Replica:
    def __init__(
        self,
        name: str,
        start: Callable[[], Awaitable[Host]],
        *,
        adapter_capacity: int,
        warmup_adapter: Path | None = None,
    ) -> None:
        """`warmup_adapter` is a PEFT folder: the first request with an adapter is slow."""
        self.name = name
        self.load = 0
        """Samples sent to it and not finished."""
        self.generation = 0
        self.frozen = False
        """Whether it has been told to generate nothing."""
        self.interruptions = 0
        """How often it was told to end what it ran."""
        self.lost_requests = 0
        self._requests = 0
        self._version: str | None = None
        self._standing: ReplicaState = "ready"
        """What operators want it to be; outlives the server."""
        self._start = start
        self._capacity = adapter_capacity
        self._warmup_adapter = warmup_adapter
        self._host: Host | None = None
        self._client: ReplicaClient | None = None
        self._adapters: ReplicaAdapters | None = None
        self._control = asyncio.Lock()
        self._lost = asyncio.Event()
        self._started_at = 0.0

    @property
    def ready(self) -> bool:
        return self._client is not None

    @property
    def open(self) -> bool:
        """Whether it gets new requests."""
        return self.ready and self._standing == "ready"

    @property
    def client(self) -> ReplicaClient:
        """Raises ReplicaLost while there is none."""
        if self._client is None:
            raise ReplicaLost(f"{self.name} is starting")
        return self._client

    @property
    def adapters(self) -> ReplicaAdapters:
        """Raises ReplicaLost while there are none."""
        if self._adapters is None:
            raise ReplicaLost(f"{self.name} is starting")
        return self._adapters

    @property
    def view(self) -> ReplicaView:
        folders = frozenset() if self._adapters is None else self._adapters.folders
        return ReplicaView(name=self.name, load=self.load, adapters=folders)

    @property
    def status(self) -> ReplicaStatus:
        missing: ReplicaState = "lost" if self.generation else "starting"
        return ReplicaStatus(
            name=self.name,
            url=None if self._client is None else self._client.url,
            state=self._standing if self.ready else missing,
            load=self.load,
            adapters=tuple(sorted(self.view.adapters)),
            generation=self.generation,
            requests=self._requests,
            lost_requests=self.lost_requests,
            version=self._version,
        )

    @contextmanager
    def loaded(self, samples: int) -> Generator[None]:
        self._requests += 1
        self.load += samples
        try:
            yield
        finally:
            self.load -= samples

    async def pause(self, mode: PauseMode) -> None:
        """Raises BackendError when the server cannot; it gets nothing new all the same."""
        async with self._controlling():
            self._standing = "paused"
            if mode == "wait":
                # What runs finishes by itself: nothing new comes.
                await self._unfreeze()
            elif self.ready:
                self.interruptions += mode == "abort"
                # Before the call: one that is given up here may take effect there.
                self.frozen = True
                await self.client.pause(mode)

    async def update(self, old: str, new: str) -> None:
        """Requests with the adapter in `old` go on with that in `new`. Raises BackendError."""
        if not self.ready:
            return
        async with self._controlling():
            if names := self.adapters.replace(old, new):
                log.info("weights_replaced", replica=self.name, names=names, folder=new)
                async with nullcontext() if self.frozen else self._paused():
                    for name in names:
                        await self.client.load_adapter(name, new, in_place=True)

    async def drain(self) -> None:
        async with self._controlling():
            self._standing = "draining"
            await self._unfreeze()

    async def resume(self) -> None:
        async with self._controlling():
            await self._unfreeze()
            self._standing = "ready"

    async def start(self) -> None:
        """Raises BackendError when it cannot be had: then the settings are wrong."""
        host = await self._start()
        client = ReplicaClient(host.url)
        adapters = ReplicaAdapters(client, self._capacity)
        try:
            self._version = await client.version()
            await self._warm_up(client, adapters)
        except BaseException as error:
            await client.close()
            await host.stop()
            if isinstance(error, ReplicaLost | Refused | RequestFailed):
                raise BackendError(f"{self.name} cannot generate: {error}") from error
            raise
        self._host, self._client, self._adapters = host, client, adapters
        self._lost.clear()
        self._started_at = time.monotonic()
        self.generation += 1

    async def supervise(self, changed: Callable[[], None]) -> None:
        """Start it again whenever it is gone, with growing pauses, for ever. `changed` is called
        when it has become ready."""
        delay_s = _FIRST_DELAY_S
        while True:
            reason = await self._wait_lost()
            log.warning("replica_lost", replica=self.name, reason=reason)
            if time.monotonic() - self._started_at > _LONG_LIFE_S:
                delay_s = _FIRST_DELAY_S
            await self.stop()
            while not self.ready:
                await asyncio.sleep(delay_s)
                delay_s = min(2 * delay_s, _LONGEST_DELAY_S)
                try:
                    await self.start()
                except BackendError as error:
                    log.warning("replica_not_started", replica=self.name, reason=str(error))
                except Exception:
                    # Whatever it is, without this loop the replica would never come back.
                    log.exception("replica_not_started", replica=self.name)
            changed()

    async def report_lost(self) -> None:
        """A request found it gone. What is still healthy is left alone."""
        if self._client is not None and not await self._client.healthy():
            self._lost.set()

    async def stop(self) -> None:
        host, client = self._host, self._client
        self._host = self._client = self._adapters = None
        self.frozen = False
        if client is not None:
            await client.close()
        if host is not None:
            await host.stop()

    async def _unfreeze(self) -> None:
        """For who is controlling it."""
        if self.frozen:
            await self.client.resume()
            self.frozen = False

    @asynccontextmanager
    async def _controlling(self) -> AsyncGenerator[None]:
        """One who tells it what to do at a time."""
        try:
            async with self._control:
                yield
        except (ReplicaLost, Refused) as error:
            raise BackendError(f"{self.name} cannot be controlled: {error}") from error

    @asynccontextmanager
    async def _paused(self) -> AsyncGenerator[None]:
        """Nothing is generated for anybody meanwhile: what runs is frozen, what comes waits."""
        with self._lost_by(ReplicaLost):
            await self.client.pause("keep")
            try:
                yield
            finally:
                with self._lost_by(Refused):
                    await self.client.resume()

    @contextmanager
    def _lost_by(self, error: type[Exception]) -> Generator[None]:
        """It may stand still for ever: have it started, or found, again."""
        try:
            yield
        except error:
            self._lost.set()
            raise

    async def _wait_lost(self) -> str:
        assert self._host is not None
        gone = asyncio.create_task(self._host.wait_gone())
        reported = asyncio.create_task(self._lost.wait())
        try:
            await asyncio.wait([gone, reported], return_when=asyncio.FIRST_COMPLETED)
            return gone.result() if gone.done() else "it does not answer"
        finally:
            for task in (gone, reported):
                task.cancel()
                with suppress(asyncio.CancelledError):
                    await task

    async def _warm_up(self, client: ReplicaClient, adapters: ReplicaAdapters) -> None:
        """The first requests are slow by seconds; whoever waits for readiness pays for them."""
        folder = None if self._warmup_adapter is None else str(self._warmup_adapter)
        params = {"max_tokens": 2, "temperature": 1.0, "logprobs": 0, "detokenize": False}
        await client.generate({"model": BASE, "token_ids": [0], "sampling_params": params})
        async with adapters.hold(folder) as model:
            await client.generate({"model": model, "token_ids": [0], "sampling_params": params})
