"""From settings to a listening server, and down again."""

from __future__ import annotations

import sys
from types import FrameType

import uvicorn

from server.app import create_app
from server.connections import Connection
from server.observability import configure_logs
from server.settings import Settings


class _Server(uvicorn.Server):
    """Tells the rooms of Ctrl-C at once, so that nobody's long-poll holds up the shutdown."""

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        self.config.app.state.rooms.drain()  # pyrefly: ignore[missing-attribute]
        super().handle_exit(sig, frame)


def serve(settings: Settings) -> int:
    """Serve until a signal; returns the exit status."""
    configure_logs(settings.log_level, settings.data / "logs" / "server.log")
    try:
        return _run(settings)
    except OSError as error:
        print(f"hearth: {error}", file=sys.stderr)
        return 1


def _run(settings: Settings) -> int:
    address = ""

    def ready() -> None:
        print(f"Hearth is ready at {address}", flush=True)

    class Patient(Connection):
        patience_s = settings.body_timeout_s

    app = create_app(settings, on_ready=ready)
    config = uvicorn.Config(
        app,
        host=settings.host,
        port=settings.port,
        http=Patient,
        log_config=None,
        access_log=False,
        # Shorter than a client's pool keeps a connection would race with its next request.
        timeout_keep_alive=120,
        timeout_graceful_shutdown=int(settings.drain_grace_s) + 1,
        backlog=4096,
    )
    server = _Server(config)
    socket = config.bind_socket()
    host, port = socket.getsockname()[:2]
    address = f"http://{f'[{host}]' if ':' in host else host}:{port}"
    print(f"Hearth is starting at {address}", flush=True)
    server.run(sockets=[socket])
    if (failure := app.state.failure) is not None:
        print(f"hearth: {failure}", file=sys.stderr)
        return 1
    return 0
