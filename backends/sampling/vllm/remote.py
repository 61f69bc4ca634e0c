"""A vLLM server that somebody else runs."""

from __future__ import annotations

import asyncio

from backends.contract import BackendError
from backends.sampling.vllm.client import ReplicaClient

_HEALTH_EVERY_S = 5.0


class RemoteServer:
    """A `Host`."""

    def __init__(self, url: str, client: ReplicaClient) -> None:
        self.url = url
        self._client = client

    @classmethod
    async def find(cls, url: str) -> RemoteServer:
        """Raises BackendError when nothing healthy answers there."""
        client = ReplicaClient(url)
        if not await client.healthy():
            await client.close()
            raise BackendError(f"no vLLM answers at {url}")
        return cls(url, client)

    async def wait_gone(self) -> str:
        while await self._client.healthy():  # noqa: ASYNC110 - nobody tells us
            await asyncio.sleep(_HEALTH_EVERY_S)
        return f"vLLM at {self.url} is not healthy any more"

    async def stop(self) -> None:
        """Leave it running, as it was found."""
        await self._client.close()
