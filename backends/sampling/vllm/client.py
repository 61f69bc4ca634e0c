"""One replica's HTTP: tokens in, tokens out, and its controls."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Generator, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager, contextmanager
from dataclasses import dataclass
from typing import Any

import aiohttp
import msgspec
import orjson
from prometheus_client.parser import text_string_to_metric_families

from backends.contract import PauseMode
from backends.sampling.vllm.answer import ANSWER, REFUSAL, Answer
from backends.sampling.vllm.errors import Refused, ReplicaLost

Body = dict[str, Any]
_Response = aiohttp.ClientResponse

_GENERATE = "/inference/v1/generate"
_CONNECT_S = 5.0
_HEALTH_S = 5.0
_SLOW_ANSWERS = 3
"""A server that is busy with something large may be late now and then."""
_CONTROL_S = 120.0
"""Loading a large adapter, or finishing what runs, takes a while."""
_IDLE_S = 4.0
"""Less than the 5 s after which vLLM's server closes an idle connection."""
_LONGEST_LINE = 1 << 24
_ENGINE_DEAD = "EngineCore encountered an issue"


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaMetrics:
    running: int
    waiting: int
    generated_tokens: int
    prompt_tokens: int
    cached_prompt_tokens: int


class ReplicaClient:
    """Every call raises ReplicaLost or Refused. A caller that is cancelled closes its connection,
    which ends the request in vLLM. Make it inside a running loop."""

    def __init__(self, url: str) -> None:
        self.url = url
        self._session = aiohttp.ClientSession(
            base_url=url,
            connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=_IDLE_S),
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=_CONNECT_S),
            headers={"Content-Type": "application/json"},
            read_bufsize=_LONGEST_LINE,
        )
        self._calls: set[asyncio.Timeout] = set()
        """Of each call under way, what can end it."""

    async def close(self) -> None:
        """Calls under way raise ReplicaLost. Their connections being closed would not end them:
        aiohttp leaves whoever reads a stream waiting."""
        now = asyncio.get_running_loop().time()
        while self._calls:
            self._calls.pop().reschedule(now)
        await self._session.close()

    async def generate(self, body: Body, session: str = "") -> Answer:
        """`session` is what a router in front of several replicas goes by."""
        async with self._generating(body, session) as response:
            return self._answer(await response.read())

    async def stream(self, body: Body, session: str = "") -> AsyncGenerator[Answer]:
        """The same in events: gains of one choice each, and the usage last."""
        body = body | {"stream": True, "stream_options": {"include_usage": True}}
        async with self._generating(body, session) as response:
            async for line in response.content:
                if not line.startswith(b"data: "):
                    continue
                if line.startswith(b"data: [DONE]"):
                    return
                event = self._answer(line[6:])
                if event.error is not None:
                    raise ReplicaLost(f"{self.url}: {event.error.message}")
                yield event
        raise ReplicaLost(f"{self.url} ended a stream in the middle")

    async def load_adapter(self, name: str, folder: str, *, in_place: bool = False) -> None:
        """`in_place` replaces the weights that the name has, under running requests too."""
        body = {"lora_name": name, "lora_path": folder, "load_inplace": in_place}
        await self._control("/v1/load_lora_adapter", body)

    async def unload_adapter(self, name: str) -> None:
        await self._control("/v1/unload_lora_adapter", {"lora_name": name})

    async def pause(self, mode: PauseMode) -> None:
        """New requests wait from now on; returns when `mode` is done with the running ones."""
        # It would forget what the frozen ones have read, and read it again after `resume`.
        clear_cache = str(mode != "keep").lower()
        await self._control("/pause", {}, params={"mode": mode, "clear_cache": clear_cache})

    async def resume(self) -> None:
        await self._control("/resume", {})

    async def healthy(self) -> bool:
        """Asks again where the answer only takes too long."""
        for _ in range(_SLOW_ANSWERS):
            try:
                async with self._session.get("/health", timeout=_total(_HEALTH_S)) as response:
                    return response.status == 200
            except TimeoutError:
                continue
            except aiohttp.ClientError:
                return False
        return False

    async def version(self) -> str:
        with self._vllms():
            return (await self._asked("/version"))["version"]

    async def served(self) -> dict[str, int]:
        """Names of the models that it has, the base model and adapters, and how many tokens each
        takes."""
        with self._vllms():
            models = (await self._asked("/v1/models"))["data"]
            return {model["id"]: model["max_model_len"] or 0 for model in models}

    async def metrics(self) -> ReplicaMetrics:
        timeout = _total(_CONNECT_S)
        async with self._answered(self._session.get("/metrics", timeout=timeout)) as response:
            return _read_metrics(await response.text())

    @contextmanager
    def _vllms(self) -> Generator[None]:
        """Raises ReplicaLost for an answer that no vLLM gives."""
        try:
            yield
        except (msgspec.DecodeError, ValueError, LookupError, TypeError) as error:
            raise ReplicaLost(f"{self.url} answers what is no vLLM's: {error}") from error

    async def _asked(self, path: str) -> Any:
        async with self._answered(self._session.get(path, timeout=_total(_CONNECT_S))) as response:
            return orjson.loads(await response.read())

    async def _control(
        self, path: str, body: Body, params: Mapping[str, str] | None = None
    ) -> None:
        timeout = _total(_CONTROL_S)
        data = orjson.dumps(body)
        call = self._session.post(path, data=data, params=params, timeout=timeout)
        async with self._answered(call) as response:
            await response.read()

    def _generating(self, body: Body, session: str) -> AbstractAsyncContextManager[_Response]:
        headers = {"x-session-id": session} if session else {}
        call = self._session.post(_GENERATE, data=orjson.dumps(body), headers=headers)
        return self._answered(call, lost_from=500)

    def _answer(self, data: bytes) -> Answer:
        with self._vllms():
            return ANSWER.decode(data)

    @asynccontextmanager
    async def _answered(
        self, call: AbstractAsyncContextManager[_Response], lost_from: int = 502
    ) -> AsyncGenerator[_Response]:
        """The response, if its status is 200. From `lost_from` on the status means that the engine
        is gone; a control call answers 500 for what is wrong with an adapter, too."""
        try:
            async with self._until_closed(), call as response:
                if response.status != 200:
                    message = _message(await response.read())
                    if response.status >= lost_from or _ENGINE_DEAD in message:
                        raise ReplicaLost(f"{self.url} answered {response.status}: {message}")
                    raise Refused(response.status, message)
                yield response
        except (aiohttp.ClientError, ConnectionError, TimeoutError) as error:
            raise ReplicaLost(f"{self.url}: {error!r}") from error
        except RuntimeError as error:
            # What aiohttp says of a call that begins after `close`.
            if not self._session.closed:
                raise
            raise ReplicaLost(f"{self.url} was given up") from error

    @asynccontextmanager
    async def _until_closed(self) -> AsyncGenerator[None]:
        """Raises TimeoutError in the block when this is closed."""
        async with asyncio.timeout(None) as end:
            self._calls.add(end)
            try:
                yield
            finally:
                self._calls.discard(end)


def _total(seconds: float) -> aiohttp.ClientTimeout:
    return aiohttp.ClientTimeout(total=seconds)


def _message(body: bytes) -> str:
    try:
        return REFUSAL.decode(body).error.message
    except msgspec.DecodeError:
        return body[:200].decode(errors="replace")


def _read_metrics(text: str) -> ReplicaMetrics:
    """Sums over the engines of one server."""
    sums: dict[str, float] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            sums[sample.name] = sums.get(sample.name, 0.0) + sample.value
    return ReplicaMetrics(
        running=int(sums["vllm:num_requests_running"]),
        waiting=int(sums["vllm:num_requests_waiting"]),
        generated_tokens=int(sums["vllm:generation_tokens_total"]),
        prompt_tokens=int(sums["vllm:prompt_tokens_total"]),
        cached_prompt_tokens=int(sums["vllm:prefix_cache_hits_total"]),
    )
