"""From prompts to results, whole or in pieces, over an engine that may die on the way."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing

import structlog

from backends.contract import (
    BackendError,
    Failure,
    SampleDelta,
    SampleRequest,
    SampleResult,
)
from server.core.errors import BadInput
from server.oai.errors import EngineLost, GenerationFailed
from server.samplers.gate import GatedEngine

log = structlog.get_logger()

_ATTEMPTS = 3

Part = SampleDelta | SampleResult


async def generate(engine: GatedEngine, requests: Sequence[SampleRequest]) -> list[SampleResult]:
    """All of them at once. When one fails, or the caller is cancelled, none goes on."""
    tasks = [asyncio.create_task(_generate(engine, request)) for request in requests]
    try:
        return await asyncio.gather(*tasks)
    finally:
        await _end(tasks)


async def stream(
    engine: GatedEngine, requests: Sequence[SampleRequest]
) -> AsyncGenerator[tuple[int, Part]]:
    """Parts of all of them as they come, each with the number of its request; the last part of
    a request is its result. A reader that leaves early stops them all."""
    parts: asyncio.Queue[tuple[int, Part | None]] = asyncio.Queue()
    tasks = [
        asyncio.create_task(_feed(engine, number, request, parts))
        for number, request in enumerate(requests)
    ]
    for number, task in enumerate(tasks):
        task.add_done_callback(lambda _, number=number: parts.put_nowait((number, None)))
    left = len(tasks)
    try:
        while left:
            number, part = await parts.get()
            if part is None:
                await tasks[number]
                left -= 1
            else:
                yield number, part
            parts.task_done()
    finally:
        await _end(tasks)


async def _generate(engine: GatedEngine, request: SampleRequest) -> SampleResult:
    last = ""
    for _ in range(_ATTEMPTS):
        try:
            return _result(await engine.sample(request))
        except BackendError as error:
            last = str(error)
            log.warning("generation_lost", request=request.request_id, why=last)
    raise EngineLost(f"the sampling engine failed {_ATTEMPTS} times: {last}")


async def _feed(
    engine: GatedEngine,
    number: int,
    request: SampleRequest,
    parts: asyncio.Queue[tuple[int, Part | None]],
) -> None:
    """Takes a part from the engine when everything before it has been read."""
    async with aclosing(_stream(engine, request)) as stream:
        async for part in stream:
            parts.put_nowait((number, part))
            await parts.join()


async def _stream(engine: GatedEngine, request: SampleRequest) -> AsyncGenerator[Part]:
    """Begins again with another engine, as long as nobody has seen anything of the first one's."""
    seen, last = False, ""
    for _ in range(_ATTEMPTS):
        try:
            async with aclosing(engine.stream(request)) as parts:
                async for part in parts:
                    seen = True
                    yield part if isinstance(part, SampleDelta) else _result(part)
            return
        except BackendError as error:
            last = str(error)
            log.warning("generation_lost", request=request.request_id, why=last)
            if seen:
                break
    raise EngineLost(f"the sampling engine failed: {last}")


def _result(outcome: SampleResult | Failure) -> SampleResult:
    if isinstance(outcome, SampleResult):
        return outcome
    if outcome.category == "user":
        raise BadInput(outcome.message)
    raise GenerationFailed(outcome.message)


async def _end(tasks: Sequence[asyncio.Task[SampleResult]] | Sequence[asyncio.Task[None]]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
