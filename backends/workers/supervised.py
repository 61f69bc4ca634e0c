"""A worker that is started again when it dies. What it held is gone: `generation` says so."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import aclosing

from backends.contract import (
    AdapterSpec,
    BackendError,
    Contents,
    CustomLoss,
    Failure,
    ForwardBackward,
    MemoryReport,
    ModelInfo,
    OptimStep,
    PassOutcome,
    SampleDelta,
    SampleRequest,
    SampleResult,
    StepResult,
)
from backends.workers.subprocess import SubprocessBackend

_FIRST_DELAY_S = 0.5
_LONGEST_DELAY_S = 30.0


class SupervisedBackend:
    """A `TrainingBackend` and a `SamplingEngine`. A call that was under way when the worker died
    raises BackendError; the next one waits for a new worker."""

    def __init__(self, start: Callable[[], Awaitable[SubprocessBackend]]) -> None:
        self._start = start
        self._worker: SubprocessBackend | None = None
        self._starting = asyncio.Lock()
        self._stopped = False
        self.generation = 0

    @property
    def alive(self) -> bool:
        return self._worker is not None and not self._worker.closed

    async def stop(self, grace_s: float) -> None:
        self._stopped = True
        if self._worker is not None:
            await self._worker.stop(grace_s)

    async def describe(self) -> ModelInfo:
        return await (await self._live()).describe()

    async def check_loss(self, loss: CustomLoss) -> str | None:
        return await (await self._live()).check_loss(loss)

    async def create(self, run: str, spec: AdapterSpec) -> None:
        await (await self._live()).create(run, spec)

    async def forward_backward(self, requests: Sequence[ForwardBackward]) -> list[PassOutcome]:
        return await (await self._live()).forward_backward(requests)

    async def optim_step(self, steps: Sequence[OptimStep]) -> list[StepResult | Failure]:
        return await (await self._live()).optim_step(steps)

    async def save(self, run: str, directory: str, contents: Contents) -> int:
        return await (await self._live()).save(run, directory, contents)

    async def load(self, run: str, directory: str, contents: Contents) -> AdapterSpec:
        return await (await self._live()).load(run, directory, contents)

    async def unload(self, run: str) -> None:
        await (await self._live()).unload(run)

    async def memory(self) -> MemoryReport:
        return await (await self._live()).memory()

    async def sample(self, request: SampleRequest) -> SampleResult | Failure:
        return await (await self._live()).sample(request)

    async def stream(
        self, request: SampleRequest
    ) -> AsyncGenerator[SampleDelta | SampleResult | Failure]:
        async with aclosing((await self._live()).stream(request)) as stream:
            async for part in stream:
                yield part

    async def cancel(self, request_id: str) -> None:
        await (await self._live()).cancel(request_id)

    async def update(self, old: str, new: str) -> None:
        await (await self._live()).update(old, new)

    async def _live(self) -> SubprocessBackend:
        """The worker, started if need be. The first start fails at once when it fails, since
        then the settings are wrong; later ones are tried for ever, with growing pauses."""
        async with self._starting:
            delay_s = _FIRST_DELAY_S
            while self._worker is None or self._worker.closed:
                if self._stopped:
                    raise BackendError("the worker was stopped")
                try:
                    self._worker = await self._start()
                    self.generation += 1
                except BackendError:
                    if self.generation == 0:
                        raise
                    await asyncio.sleep(delay_s)
                    delay_s = min(2 * delay_s, _LONGEST_DELAY_S)
            return self._worker
