"""A vLLM server of ours: a process with children, started and ended as one."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import sys
import time
from asyncio.subprocess import DEVNULL, PIPE, Process
from collections.abc import Generator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from backends.contract import BackendError
from backends.sampling.vllm.client import ReplicaClient
from backends.sampling.vllm.last_words import first_error
from backends.sampling.vllm.launch import LaunchSettings, command, environment
from backends.workers.subprocess import Log

_GUARD = Path(__file__).with_name("guard.py")
_PLUGIN = "hearth-vllm-cpu-lora"
_HEALTH_EVERY_S = 1.0
_START_S = 1800.0
"""Large models are read from slow disks."""
_WATCH_EVERY_S = 10.0
_SILENT_S = 60.0
"""A server that answers nothing for so long hangs, however busy the machine is."""
_STOP_S = 15.0
_LAST_BYTES = 32_768
"""How much of its log tells why a server ended: traces of several processes."""


class LocalServer:
    """A `Host`. Started once; a replica that comes back is another of these."""

    def __init__(self, process: Process, url: str, log: Log) -> None:
        self.url = url
        self._process = process
        self._log = log

    @classmethod
    async def start(
        cls, settings: LaunchSettings, cores: Sequence[int], log_file: Path
    ) -> LocalServer:
        """Returns when it answers. Raises BackendError with its last words. `log_file` is appended
        to."""
        if settings.on_cpu:
            await _require_plugin(settings.python)
        with reserved_port() as port:
            return await cls._start_at(port, settings, cores, log_file)

    @classmethod
    async def _start_at(
        cls, port: int, settings: LaunchSettings, cores: Sequence[int], log_file: Path
    ) -> LocalServer:
        log = Log(log_file)
        with log_file.open("ab") as output:
            process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-I", _GUARD),
                *command(settings, port),
                env=environment(settings, cores),
                # Closed when this process ends in whatever way, which ends the server.
                stdin=PIPE,
                stdout=output,
                stderr=output,
                # A group of its own: the engine and the workers end with it, Ctrl-C is not for it.
                process_group=0,
            )
        server = cls(process, f"http://127.0.0.1:{port}", log)
        try:
            async with asyncio.timeout(_START_S):
                await server._wait_ready()
        except TimeoutError:
            await server.stop()
            raise BackendError(f"vLLM was not ready in {_START_S:.0f} s: {_why(log)}") from None
        except BaseException:
            await server.stop()
            raise
        return server

    @property
    def pid(self) -> int:
        return self._process.pid

    async def wait_gone(self) -> str:
        """Returns why, when the server has ended by itself, or hangs."""
        ended = asyncio.create_task(self._wait_ended())
        client = ReplicaClient(self.url)
        heard_at = time.monotonic()
        try:
            while time.monotonic() - heard_at < _SILENT_S:
                await asyncio.wait([ended], timeout=_WATCH_EVERY_S)
                if ended.done():
                    return ended.result()
                if await client.healthy():
                    heard_at = time.monotonic()
            return f"vLLM has answered nothing for {_SILENT_S:.0f} s"
        finally:
            ended.cancel()
            await client.close()

    async def _wait_ended(self) -> str:
        code = await self._process.wait()
        return f"vLLM ended with code {code}: {_why(self._log)}"

    async def stop(self) -> None:
        """Ask it to end, then end what is left of its group."""
        if self._process.returncode is None:
            os.killpg(self._process.pid, signal.SIGTERM)
            with suppress(TimeoutError):
                await asyncio.wait_for(self._process.wait(), _STOP_S)
        # Its children outlive it when it dies by itself.
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        await self._process.wait()

    async def _wait_ready(self) -> None:
        client = ReplicaClient(self.url)
        gone = asyncio.create_task(self._wait_ended())
        try:
            while not await client.healthy():
                await asyncio.wait([gone], timeout=_HEALTH_EVERY_S)
                if gone.done():
                    raise BackendError(gone.result())
        finally:
            gone.cancel()
            await client.close()


async def _require_plugin(python: Path) -> None:
    """Without it vLLM mixes adapters up on a CPU."""
    question = f"from importlib.metadata import version; version({_PLUGIN!r})"
    try:
        asked = await asyncio.create_subprocess_exec(python, "-c", question, stderr=DEVNULL)
    except OSError as error:
        raise BackendError(f"{python} cannot be run: {error}; make install-vllm") from error
    if await asked.wait() != 0:
        raise BackendError(f"{python} has no {_PLUGIN}: make install-vllm")


def _why(log: Log) -> str:
    return first_error(log.tail(_LAST_BYTES)) or log.last_words()


@contextmanager
def reserved_port() -> Generator[int]:
    """A free port of this machine that nobody else is given while the block lasts, but that a
    server which sets SO_REUSEADDR, as vLLM does, may listen on: Linux allows it where the other
    holder sets it too, and does not listen."""
    with socket.socket() as holder:
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        holder.bind(("127.0.0.1", 0))
        yield holder.getsockname()[1]
