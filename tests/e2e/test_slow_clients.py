"""Clients that stand still, or never stop, keep nobody waiting and are given up in the end."""

from __future__ import annotations

import contextlib
import re
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from urllib.parse import urlsplit

import pytest
import tinker

from tests.e2e.client import MODEL, Raw, new_run, train
from tests.e2e.conftest import MAX_BODY_BYTES, SETTINGS
from tests.running_server import RunningServer

PATIENCE_S = 6.0
AT_ONCE_S = 1.0
CROWD = 100

LENGTH = re.compile(rb"content-length: (\d+)")
Connect = Callable[[str], socket.socket]


@pytest.fixture(scope="module")
def impatient(
    tmp_path_factory: pytest.TempPathFactory, model_path: Path
) -> Iterator[RunningServer]:
    settings = {**SETTINGS, "HEARTH_BODY_TIMEOUT_S": str(PATIENCE_S)}
    running = RunningServer(tmp_path_factory.mktemp("slow") / "data", {MODEL: model_path}, settings)
    running.start()
    yield running
    running.kill()


@pytest.fixture
def connect(impatient: RunningServer) -> Iterator[Connect]:
    """Opens a connection, says so much on it, and leaves it open."""
    address = urlsplit(impatient.url)
    assert address.hostname
    assert address.port
    with contextlib.ExitStack() as opened:

        def connection(said: str = "") -> socket.socket:
            made = socket.create_connection((address.hostname, address.port), timeout=20)
            opened.enter_context(made)
            made.sendall(said.encode())
            return made

        yield connection


def post(route: str, length: int, body: str = "") -> str:
    return f"POST /api/v1/{route} HTTP/1.1\r\nhost: x\r\ncontent-length: {length}\r\n\r\n{body}"


def answer(connection: socket.socket) -> str:
    """Everything until the server hangs up."""
    found = b""
    while part := connection.recv(65536):
        found += part
    return found.decode()


def first(connection: socket.socket) -> str:
    """One answer, on a connection that stays open."""
    head, _, body = connection.recv(65536).partition(b"\r\n\r\n")
    while len(body) < int(LENGTH.search(head)[1]):
        body += connection.recv(65536)
    return (head + body).decode()


def test_a_crowd_of_slow_clients_keeps_nobody_waiting(
    impatient: RunningServer, connect: Connect
) -> None:
    raw = Raw(impatient.url, "")
    session = raw.session()
    started = time.monotonic()
    halves = [connect(post("forward_backward", 1000, "x" * 500)) for _ in range(CROWD)]
    idle = [connect("") for _ in range(CROWD)]
    headless = [connect("POST /api/v1/asample HTTP/1.1\r\nhost:") for _ in range(CROWD // 10)]

    service = tinker.ServiceClient(base_url=impatient.url, api_key="tml-any")
    run = new_run(service)
    beats: list[float] = []
    while not beats or time.monotonic() - started < PATIENCE_S - 2:
        train(run, 1)
        asked = time.monotonic()
        assert raw.post("session_heartbeat", {"session_id": session}).is_success
        beats.append(time.monotonic() - asked)
    assert max(beats) < AT_ONCE_S

    for connection in halves:
        told = answer(connection)
        assert told.startswith("HTTP/1.1 408 ")
        assert "after 500 bytes" in told
        assert "x-should-retry: true" in told
    assert {answer(connection) for connection in idle + headless} == {""}
    assert time.monotonic() - started < 2.5 * PATIENCE_S
    train(run, 1)


def test_a_body_that_drips_is_given_up(connect: Connect) -> None:
    connection = connect(post("forward_backward", 1000))
    connection.settimeout(0.2)
    deadline = time.monotonic() + 2 * PATIENCE_S
    while time.monotonic() < deadline:
        connection.sendall(b"x")
        with contextlib.suppress(TimeoutError):
            assert first(connection).startswith("HTTP/1.1 408 ")
            return
    pytest.fail("still listening")


def test_a_body_that_is_announced_too_large_is_refused_before_it_comes(connect: Connect) -> None:
    started = time.monotonic()
    told = first(connect(post("asample", MAX_BODY_BYTES + 1)))
    assert told.startswith("HTTP/1.1 413 ")
    assert time.monotonic() - started < AT_ONCE_S


def test_a_body_that_nobody_reads_is_not_waited_for(connect: Connect) -> None:
    connection = connect(post("client/dynamic_config", 1000))
    assert first(connection).startswith("HTTP/1.1 200 ")
    connection.sendall(b"x")
    started = time.monotonic()
    assert answer(connection) == ""
    assert time.monotonic() - started < 2 * PATIENCE_S


def test_a_slow_body_that_keeps_coming_is_read(connect: Connect) -> None:
    """Longer in all than any pause may be."""
    size, pieces = 20_000, 10
    connection = connect(post("create_session", size * pieces))
    for _ in range(pieces):
        time.sleep(1.1 * PATIENCE_S / pieces)
        connection.sendall(b" " * size)
    assert "The request body is not JSON" in first(connection)
