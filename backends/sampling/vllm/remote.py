"""A vLLM server that somebody else runs."""

from __future__ import annotations

import asyncio
from contextlib import suppress

from backends.contract import BackendError
from backends.sampling.vllm.adapters import BASE
from backends.sampling.vllm.client import ReplicaClient
from backends.sampling.vllm.errors import Refused, ReplicaLost
from backends.sampling.vllm.model_facts import ModelFacts

_HEALTH_EVERY_S = 5.0


class RemoteServer:
    """A `Host`."""

    def __init__(self, url: str, client: ReplicaClient) -> None:
        self.url = url
        self._client = client

    @classmethod
    async def find(cls, url: str, facts: ModelFacts) -> RemoteServer:
        """Raises BackendError when no healthy vLLM answers there, or not with this model."""
        client = ReplicaClient(url)
        try:
            if not await client.healthy():
                raise BackendError(f"no vLLM answers at {url}")
            # A service that was killed may have left it paused. Without its controls it cannot be.
            with suppress(Refused):
                await client.resume()
            await _check(client, facts)
        except BaseException as error:
            await client.close()
            if isinstance(error, ReplicaLost):
                raise BackendError(f"no vLLM answers at {url}: {error}") from error
            raise
        return cls(url, client)

    async def wait_gone(self) -> str:
        while await self._client.healthy():  # noqa: ASYNC110 - nobody tells us
            await asyncio.sleep(_HEALTH_EVERY_S)
        return f"vLLM at {self.url} is not healthy any more"

    async def stop(self) -> None:
        """Leave it running, as it was found."""
        await self._client.close()


async def _check(client: ReplicaClient, facts: ModelFacts) -> None:
    """Raises BackendError when it serves another model, as far as can be told."""
    last = facts.vocab_size - 1
    params = {"max_tokens": 1, "detokenize": False}
    try:
        served = await client.served()
        if BASE not in served:
            names = ", ".join(served)
            raise BackendError(
                f"vLLM at {client.url} serves {names}: start it with --served-model-name {BASE}"
            )
        if served[BASE] < facts.max_context_length:
            raise BackendError(
                f"vLLM at {client.url} takes {served[BASE]} tokens, and the model here "
                f"{facts.max_context_length}: set max_context_length, or its --max-model-len"
            )
        await client.generate({"model": BASE, "token_ids": [last], "sampling_params": params})
    except Refused as refused:
        raise BackendError(
            f"vLLM at {client.url} does not take token {last}, the last of the model here: "
            f"{refused.message}"
        ) from refused
    except ReplicaLost as error:
        raise BackendError(f"vLLM at {client.url} cannot generate: {error}") from error
