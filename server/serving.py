"""From settings to a listening server, and down again."""

from __future__ import annotations

import fcntl
import resource
import socket
import sys
from pathlib import Path
from types import FrameType
from typing import IO

import uvicorn

from server.app import create_app
from server.connections import Connection
from server.live import LiveServer, withdraw
from server.observability import configure_logs
from server.settings import Settings

_BACKLOG = 4096
_CONNECTIONS_END_S = 5
"""Long-polls end at once when the server drains, and submissions are short; a body that stands
still must not hold up the shutdown. Running work is waited for after this, by the rooms."""


class _Server(uvicorn.Server):
    """Tells the rooms of Ctrl-C at once, so that nobody's long-poll holds up the shutdown."""

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        state = self.config.app.state  # pyrefly: ignore[missing-attribute]
        state.rooms.drain()
        state.interrupt_start()
        super().handle_exit(sig, frame)


def serve(settings: Settings) -> int:
    """Serve until a signal; returns the exit status."""
    try:
        configure_logs(settings.log_level, settings.data / "logs" / "server.log")
        with lock(settings.data), listen(settings.host, settings.port) as listener:
            return _run(settings, listener)
    except OSError as error:
        print(f"hearth: {error}", file=sys.stderr)
        return 1


def lock(data: Path) -> IO[str]:
    """Hold the data folder for this process: two servers on one would undo each other's work.

    Raises OSError when another process holds it; closing the file, or dying, lets go."""
    file = (data / "lock").open("w")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        file.close()
        raise OSError(f"another server is running on the data folder {data}") from None
    return file


def listen(host: str, port: int) -> socket.socket:
    """Raises OSError that names host and port."""
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        listener = socket.create_server((host, port), family=family, backlog=_BACKLOG)
    except OSError as error:
        raise OSError(f"cannot listen on {host}, port {port}: {error.strerror}") from error
    # asyncio does so only for sockets it makes itself. Connections inherit it; without, the body of
    # an answer waits up to 40 ms for the client's word that it has the headers.
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return listener


def _run(settings: Settings, listener: socket.socket) -> int:
    _allow_many_connections()
    host, port = listener.getsockname()[:2]
    address = f"http://{f'[{host}]' if ':' in host else host}:{port}"

    class Patient(Connection):
        patience_s = settings.body_timeout_s

    def ready() -> None:
        LiveServer(address, app.state.rooms.operator_token).announce(settings.data)
        print(f"Hearth is ready at {address}", flush=True)

    app = create_app(settings, on_ready=ready)
    config = uvicorn.Config(
        app,
        http=Patient,
        log_config=None,
        access_log=False,
        # Shorter than a client's pool keeps a connection would race with its next request.
        timeout_keep_alive=120,
        timeout_graceful_shutdown=_CONNECTIONS_END_S,
        backlog=_BACKLOG,
    )
    print(f"Hearth is starting at {address}", flush=True)
    try:
        _Server(config).run(sockets=[listener])
    except SystemExit:  # uvicorn's way to say that the start failed; why is in `failure`
        if app.state.failure is None:
            raise
    finally:
        withdraw(settings.data)
    if (failure := app.state.failure) is not None:
        print(f"hearth: {failure}", file=sys.stderr)
        return 1
    return 0


def _allow_many_connections() -> None:
    """Each waiting sample holds a connection, and the usual soft limit is 1,024 files."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
