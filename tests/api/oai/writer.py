"""A backend that writes what it is told to, and an ASGI client that reads while it writes."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator
from dataclasses import replace
from typing import Any

import numpy as np
from fastapi import FastAPI

from backends.contract import (
    BackendError,
    Failure,
    ModelInfo,
    SampleDelta,
    SampledSequence,
    SampleRequest,
    SampleResult,
    TopkLogprobs,
)
from tests.fake_backend import FakeBackend
from tests.tiny_models import EOS_TOKEN_ID, VOCAB_SIZE


class Writer(FakeBackend):
    """Token i is byte i. Each sample is `script`, cut at `max_tokens`; logprobs count down.
    `step` lets a stream go on by some tokens; `fail_with` is what happens instead of an end."""

    def __init__(self) -> None:
        super().__init__()
        self.script: list[int] = [*b"Hello", EOS_TOKEN_ID]
        self.fail_with: Failure | None = None
        self.deaths = 0
        """How many calls from now on lose the engine."""
        self.cancelled: list[str] = []
        self._asked = asyncio.Condition()
        self._allowed: asyncio.Semaphore | None = None

    async def describe(self) -> ModelInfo:
        info = await super().describe()
        return replace(
            info, vocab_size=VOCAB_SIZE, max_context_length=128, eos_token_ids=(EOS_TOKEN_ID,)
        )

    def by_steps(self) -> None:
        self._allowed = asyncio.Semaphore(0)

    def step(self, tokens: int = 1) -> None:
        assert self._allowed is not None
        for _ in range(tokens):
            self._allowed.release()

    async def asked(self, number: int) -> None:
        """Returns when so many requests have come."""
        async with self._asked:
            await self._asked.wait_for(lambda: len(self.sampled) >= number)

    async def sample(self, request: SampleRequest) -> SampleResult | Failure:
        async for part in self.stream(request):
            last = part
        assert not isinstance(last, SampleDelta)
        return last

    async def stream(
        self, request: SampleRequest
    ) -> AsyncGenerator[SampleDelta | SampleResult | Failure]:
        self.sampled.append(request)
        async with self._asked:
            self._asked.notify_all()
        if self.deaths:
            self.deaths -= 1
            raise BackendError("the worker ended with code -9")
        result = self._result(request)
        try:
            for at in range(len(result.sequences[0].tokens)):
                if self._allowed is not None:
                    await self._allowed.acquire()
                for index, sequence in enumerate(result.sequences):
                    yield _delta(index, sequence, at)
        except (asyncio.CancelledError, GeneratorExit):
            self.cancelled.append(request.request_id)
            raise
        yield self.fail_with or result

    def _result(self, request: SampleRequest) -> SampleResult:
        tokens = np.array(self.script[: request.max_tokens], np.int32)
        ended = EOS_TOKEN_ID in tokens.tolist()
        sequence = SampledSequence(
            tokens=tokens,
            logprobs=-np.arange(len(tokens), dtype=np.float32),
            stop_reason="stop" if ended or request.stop_strings else "length",
            topk=_topk(len(tokens), request.topk_sample_logprobs),
        )
        length = len(request.prompt)
        logprobs = -np.arange(length, dtype=np.float32)
        return SampleResult(
            sequences=(sequence,) * request.num_samples,
            prompt_logprobs=logprobs if request.prompt_logprobs else None,
            topk_prompt_logprobs=_topk(length, request.topk_prompt_logprobs),
            prompt_cache_hit_tokens=2,
        )


def _topk(length: int, k: int) -> TopkLogprobs | None:
    if not k:
        return None
    ids = np.tile(np.arange(65, 65 + k, dtype=np.int32), (length, 1))
    return TopkLogprobs(token_ids=ids, logprobs=-(ids - 65).astype(np.float32))


def _delta(index: int, sequence: SampledSequence, at: int) -> SampleDelta:
    topk = sequence.topk
    return SampleDelta(
        index=index,
        tokens=sequence.tokens[at : at + 1],
        logprobs=sequence.logprobs[at : at + 1],
        topk=topk
        and TopkLogprobs(
            token_ids=topk.token_ids[at : at + 1], logprobs=topk.logprobs[at : at + 1]
        ),
    )


class Reader:
    """One request to the application, read as it is answered, that can hang up."""

    def __init__(self, app: FastAPI, path: str, body: dict[str, Any]) -> None:
        self.status = 0
        self._received: asyncio.Queue[bytes] = asyncio.Queue()
        self._hung_up = asyncio.Event()
        self._body: bytes | None = json.dumps(body).encode()
        scope = {
            "type": "http",
            "asgi": {"version": "3.0", "spec_version": "2.3"},
            "http_version": "1.1",
            "method": "POST",
            "scheme": "http",
            "path": path,
            "raw_path": path.encode(),
            "root_path": "",
            "query_string": b"",
            "headers": [(b"content-type", b"application/json")],
            "client": ("127.0.0.1", 1),
            "server": ("hearth", 80),
        }
        self.task = asyncio.create_task(app(scope, self._receive, self._send))

    async def event(self) -> str:
        """The next server-sent event."""
        raw = await asyncio.wait_for(self._received.get(), 5)
        return raw.decode().removeprefix("data: ").strip()

    async def chunk(self) -> dict[str, Any]:
        return json.loads(await self.event())

    async def hang_up(self) -> None:
        self._hung_up.set()
        await asyncio.wait_for(self.task, 5)

    async def _receive(self) -> dict[str, Any]:
        if self._body is not None:
            body, self._body = self._body, None
            return {"type": "http.request", "body": body, "more_body": False}
        await self._hung_up.wait()
        return {"type": "http.disconnect"}

    async def _send(self, message: dict[str, Any]) -> None:
        if message["type"] == "http.response.start":
            self.status = message["status"]
        elif message["body"]:
            self._received.put_nowait(message["body"])
