"""A backend hosted in a process of its own, so that arithmetic never holds up the service and its
death takes nothing else along. Imports no torch."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
from asyncio.subprocess import DEVNULL, Process
from collections.abc import AsyncGenerator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TypeVar

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
from backends.workers import messages
from backends.workers.backlog import Backlog
from backends.workers.commands import Command
from backends.workers.connection import Connection

Expected = TypeVar("Expected")

_LAST_BYTES = 2000
"""How much of its log tells why a worker died."""

_EXIT_S = 5.0
"""How long a worker that closed its socket may take to be gone."""

_ENVIRONMENT = {"OMP_WAIT_POLICY": "PASSIVE"}
"""Threads that wait for each other sleep, unless whoever started the service decided otherwise.
OpenMP's default is to spin, on the core that the thread they wait for may need."""


class SubprocessBackend:
    """A `TrainingBackend` and a `SamplingEngine`. Calls may overlap: training calls run in the
    order they were made, samples beside them. When the worker dies, every call under way and
    every later one raises BackendError; `wait_closed` is the moment to start another.

    A BackendError while the backend is not `closed` is of that one call: the worker goes on."""

    def __init__(self, process: Process, connection: Connection, log: Log) -> None:
        self._process = process
        self._connection = connection
        self._log = log
        self._stopped = False
        self._closing = asyncio.create_task(self._close())

    @classmethod
    async def start(cls, command: Command, log_file: str | Path) -> SubprocessBackend:
        """Returns when the model is loaded. Raises BackendError with the worker's last words
        when it cannot be. `log_file` is appended to."""
        backend = await cls._spawn(command, Log(Path(log_file)))
        try:
            await backend._connection.ready()
        except BaseException:
            await backend.stop(0.0)
            raise
        return backend

    @property
    def closed(self) -> bool:
        """Whether it takes no more calls: from the moment it leaves, before anyone hears why."""
        return self._connection.closed

    @property
    def pid(self) -> int:
        return self._process.pid

    async def wait_closed(self) -> None:
        """Returns when the worker is gone, asked to or not."""
        await asyncio.wait([self._closing])

    async def stop(self, grace_s: float) -> None:
        """Let the worker finish the microbatch or token under way, for so long, then kill it."""
        self._stopped = True
        if not self._closing.done():
            with suppress(BackendError):
                self._connection.post(messages.Stop())
            await asyncio.wait([self._closing], timeout=grace_s)
        self._kill()
        await self.wait_closed()

    async def describe(self) -> ModelInfo:
        return (await self._call(messages.Describe(), messages.Described)).info

    async def check_loss(self, loss: CustomLoss) -> str | None:
        return (await self._call(messages.CheckLoss(loss), messages.Checked)).refusal

    async def create(self, run: str, spec: AdapterSpec) -> None:
        await self._call(messages.Create(run, spec), messages.Done)

    async def forward_backward(self, requests: Sequence[ForwardBackward]) -> list[PassOutcome]:
        call = messages.RunForwardBackward(tuple(requests))
        return [o.value for o in (await self._call(call, messages.Losses)).outcomes]

    async def optim_step(self, steps: Sequence[OptimStep]) -> list[StepResult | Failure]:
        call = messages.RunOptimStep(tuple(steps))
        return [o.value for o in (await self._call(call, messages.Steps)).outcomes]

    async def save(self, run: str, directory: str, contents: Contents) -> int:
        call = messages.Save(run, directory, contents)
        return (await self._call(call, messages.Saved)).num_bytes

    async def load(self, run: str, directory: str, contents: Contents) -> AdapterSpec:
        return (await self._call(messages.Load(run, directory, contents), messages.Loaded)).spec

    async def unload(self, run: str) -> None:
        await self._call(messages.Unload(run), messages.Done)

    async def memory(self) -> MemoryReport:
        return (await self._call(messages.Memory(), messages.Remembered)).report

    async def sample(self, request: SampleRequest) -> SampleResult | Failure:
        """A caller that is cancelled cancels the request."""
        try:
            call = messages.Sample(request)
            reply = await self._call(call, messages.Sampled | messages.Failed)
        except asyncio.CancelledError:
            with suppress(BackendError):
                self._connection.post(messages.Cancel(request.request_id))
            raise
        return reply.value

    async def stream(
        self, request: SampleRequest
    ) -> AsyncGenerator[SampleDelta | SampleResult | Failure]:
        backlog = Backlog()
        call = messages.Sample(request, stream=True)
        reply = self._connection.follow(call, lambda progress: backlog.add(progress.deltas))
        reply.add_done_callback(lambda _: backlog.wake())
        try:
            over = False
            while not over:
                await backlog.wait()
                over = reply.done()
                for delta in backlog.take():
                    yield delta
            yield _expected(reply.result(), messages.Sampled | messages.Failed).value
        finally:
            if not reply.done():
                reply.cancel()
                with suppress(BackendError):
                    self._connection.post(messages.Cancel(request.request_id))

    async def cancel(self, request_id: str) -> None:
        await self._call(messages.Cancel(request_id), messages.Done)

    async def update(self, old: str, new: str) -> None:
        await self._call(messages.Update(old, new), messages.Done)

    @classmethod
    async def _spawn(cls, command: Command, log: Log) -> SubprocessBackend:
        ours, theirs = socket.socketpair()
        with theirs, log.path.open("ab") as output:
            try:
                process = await asyncio.create_subprocess_exec(
                    *(command.python, "-m", command.module, *command.words),
                    *("--fd", str(theirs.fileno())),
                    pass_fds=[theirs.fileno()],
                    env={**_ENVIRONMENT, **os.environ, **command.environment},
                    stdin=DEVNULL,
                    stdout=output,
                    stderr=output,
                    # Out of the terminal's group, whose Ctrl-C is for the service to act on; and so
                    # that what the worker starts can be told from all else.
                    process_group=0,
                )
            except BaseException:
                ours.close()
                raise
        return cls(process, Connection(ours), log)

    async def _call(self, call: messages.Call, expected: type[Expected]) -> Expected:
        return _expected(await self._connection.call(call), expected)

    async def _close(self) -> None:
        """Wait for the worker's end, see that it is gone, and tell everyone."""
        await self._connection.wait_closed()
        try:
            await asyncio.wait_for(self._process.wait(), _EXIT_S)
        except TimeoutError:
            self._kill()
        code = await self._process.wait()
        # What it started does not outlive it; Ray's own processes would, for minutes.
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        if self._stopped:
            error = BackendError("the worker was stopped")
        else:
            error = BackendError(f"the worker ended with code {code}: {self._log.last_words()}")
        await self._connection.fail(error)

    def _kill(self) -> None:
        with suppress(ProcessLookupError):
            self._process.kill()


def _expected(reply: messages.Reply, expected: type[Expected]) -> Expected:
    if isinstance(reply, messages.Broke):
        raise BackendError(reply.message)
    assert isinstance(reply, expected), reply
    return reply


class Log:
    """The file that a worker writes to, from where it is now."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._start = path.stat().st_size if path.exists() else 0

    def last_words(self) -> str:
        """The end of what was written since, in one line."""
        text = self.tail(_LAST_BYTES)
        return " | ".join(line.strip() for line in text.splitlines() if line.strip())

    def tail(self, num_bytes: int) -> str:
        """The end of what was written since; why it cannot be read, if so: whoever asks has
        something worse to tell."""
        try:
            with self.path.open("rb") as file:
                size = file.seek(0, 2)
                file.seek(max(self._start, size - num_bytes))
                return file.read().decode(errors="replace")
        except OSError as error:
            return str(error)
