"""What all processes behind a socket have in common: they listen to whoever started them, and end
with it; they log lines; and a call that breaks is told of."""

from __future__ import annotations

import logging
import os
import signal
import socket
import sys
import threading
from collections.abc import Callable

import torch

from backends.contract import BackendError
from backends.workers.messages import Broke, Call, Reply
from backends.workers.wire import Channel, MalformedFrameError

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}

_log = logging.getLogger(__name__)


class _OneLine(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        return super().format(record).replace("\n", " | ")


def begin(name: str) -> None:
    """Log under this name. The terminal's Ctrl-C is for whoever started the process."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_OneLine(f"%(asctime)s {name} %(levelname)s %(message)s"))
    logging.basicConfig(level=logging.INFO, handlers=[handler])


class Connection:
    """The socket, read by one thread of its own from the start, so that even a process that is
    busy or still loading leaves as soon as nobody listens."""

    def __init__(self, fd: int, deliver: Callable[[tuple[int, Call]], None]) -> None:
        """`deliver` takes each call with its id, on that thread."""
        self._channel = Channel[Call](socket.socket(fileno=fd), Call)
        self._deliver = deliver
        self._sending = threading.Lock()
        threading.Thread(target=self._receive, name="receive", daemon=True).start()

    def send(self, call_id: int, reply: Reply) -> None:
        try:
            with self._sending:
                self._channel.send(call_id, reply)
        except OSError:
            _leave()

    def _receive(self) -> None:
        while True:
            try:
                # No name for the call here: it would live on until the next one comes.
                self._deliver(self._channel.receive())
            except MalformedFrameError as error:
                _log.warning("malformed call %d: %s", error.call_id, error)
                self.send(error.call_id, Broke(f"malformed call: {error}"))
            except (EOFError, OSError):
                _leave()


def _leave() -> None:
    """At once, in the middle of a pass too: saved folders are whole or absent at any moment. With
    all that it started, where it leads its process group."""
    if os.getpgrp() == os.getpid():
        os.killpg(0, signal.SIGKILL)
    os._exit(0)


def device_named(name: str) -> torch.device:
    """`auto` is a GPU if torch finds one."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    return torch.device(name)


def explained(error: Exception) -> str:
    """What the caller is told of a call that broke. The log has the rest, unless it says all."""
    if isinstance(error, BackendError):
        return str(error)
    _log.error("a call broke", exc_info=error)
    return f"{type(error).__name__}: {error}"
