"""Which adapters one replica holds. Folders never change, so a folder's name is its version."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from hashlib import blake2b

from backends.contract import Failure
from backends.sampling.vllm.client import ReplicaClient
from backends.sampling.vllm.errors import Refused, ReplicaLost, RequestFailed

BASE = "base"
"""What a replica calls the base model."""
_LOADED_ALREADY = "has already been loaded"


def adapter_name(folder: str) -> str:
    """What a replica calls the adapter; also part of what its cached prefixes are keyed by."""
    return f"adapter-{blake2b(folder.encode(), digest_size=16).hexdigest()}"


@dataclass(eq=False)
class _Resident:
    loading: asyncio.Task[None]
    users: int = 0
    newer: str | None = None
    """The folder whose weights its requests go on with; new ones hold that instead."""


class ReplicaAdapters:
    """Loaded when first needed, once for all who wait; the one that was not used for longest leaves
    when there are more than `capacity`, never under a request."""

    def __init__(self, client: ReplicaClient, capacity: int) -> None:
        self._client = client
        self._capacity = capacity
        self._resident: OrderedDict[str, _Resident] = OrderedDict()
        self._leaving: dict[str, asyncio.Task[None]] = {}

    @property
    def folders(self) -> frozenset[str]:
        return frozenset(self._resident)

    @asynccontextmanager
    async def hold(self, folder: str | None) -> AsyncGenerator[str]:
        """The name to send while the block runs. Raises RequestFailed for a folder that vLLM does
        not take, ReplicaLost."""
        if folder is None:
            yield BASE
            return
        folder = self._newest(folder)
        resident = self._resident.get(folder) or self._open(folder)
        self._resident.move_to_end(folder)
        resident.users += 1
        try:
            self._drop_unneeded()
            # One caller's cancellation must not end the loading that others wait for.
            await asyncio.shield(resident.loading)
            yield adapter_name(folder)
        finally:
            resident.users -= 1
            self._drop_unneeded()

    def replace(self, old: str, new: str) -> list[str]:
        """From now on `new` is held instead of `old`. Gives the names under which requests go on
        with older weights."""
        behind = [f for f, r in self._resident.items() if old in (f, r.newer)]
        for folder in behind:
            self._resident[folder].newer = new
        self._drop_unneeded()
        return [adapter_name(folder) for folder in behind if folder in self._resident]

    def forget(self, folder: str) -> None:
        """The replica turned out not to hold it."""
        self._resident.pop(folder, None)

    def _newest(self, folder: str) -> str:
        resident = self._resident.get(folder)
        return folder if resident is None or resident.newer is None else resident.newer

    def _open(self, folder: str) -> _Resident:
        resident = _Resident(asyncio.create_task(self._load(folder)))
        self._resident[folder] = resident

        def loaded(loading: asyncio.Task[None]) -> None:
            failed = loading.cancelled() or loading.exception() is not None
            if failed and self._resident.get(folder) is resident:
                del self._resident[folder]
            # Whoever wanted it may have left meanwhile.
            self._drop_unneeded()

        resident.loading.add_done_callback(loaded)
        return resident

    async def _load(self, folder: str) -> None:
        if folder in self._leaving:
            await asyncio.wait([self._leaving[folder]])
        try:
            await self._client.load_adapter(adapter_name(folder), folder)
        except Refused as refused:
            if _LOADED_ALREADY in refused.message:
                return
            message = f"the adapter {folder} cannot be loaded: {refused.message}"
            raise RequestFailed(Failure(message=message, category="server")) from refused

    def _drop_unneeded(self) -> None:
        """Of those that nobody uses: the ones that were replaced, then the oldest beyond
        `capacity`."""
        idle = [f for f, r in self._resident.items() if not r.users and r.loading.done()]
        replaced = [folder for folder in idle if self._resident[folder].newer is not None]
        kept = [folder for folder in idle if folder not in replaced]
        surplus = len(self._resident) - len(replaced) - self._capacity
        for folder in replaced + kept[: max(0, surplus)]:
            self._drop(folder)

    def _drop(self, folder: str) -> None:
        del self._resident[folder]
        task = asyncio.create_task(self._unload(folder))
        self._leaving[folder] = task
        task.add_done_callback(lambda _: self._leaving.pop(folder))

    async def _unload(self, folder: str) -> None:
        # A replica that is gone, or has forgotten it, does not hold it either.
        with suppress(Refused, ReplicaLost):
            await self._client.unload_adapter(adapter_name(folder))
