"""A real server for a benchmark, and what its processes cost."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import psutil
import tinker

from tests.running_server import RunningServer

# For every SDK from here on: a proxy cannot reach this machine's loopback.
os.environ["NO_PROXY"] = "127.0.0.1"
os.environ["TINKER_TELEMETRY"] = "0"

NO_KEY = "tml-benchmark"
"""What the SDK sends where the server asks for none."""


@contextmanager
def serving(
    models: Mapping[str, Path],
    threads: int,
    tenants: Sequence[str] = (),
    options: Sequence[str] = (),
) -> Generator[RunningServer]:
    """`hearth serve` with its defaults, but for `options`, on a folder of its own, until the block
    ends; with a key for each tenant, or without any."""
    with tempfile.TemporaryDirectory() as folder:
        server = RunningServer(
            Path(folder) / "data", dict(models), threads=threads, options=options
        )
        for tenant in tenants:
            server.create_key(tenant)
        server.start()
        try:
            yield server
        finally:
            server.kill()  # what an orderly stop would save, nobody will ask for


@contextmanager
def client(server: RunningServer, tenant: str | None = None) -> Generator[tinker.ServiceClient]:
    """The SDK, as one tenant; its session and its heartbeat end with the block."""
    key = server.keys[tenant] if tenant else NO_KEY
    with tinker.ServiceClient(base_url=server.url, api_key=key) as service:
        yield service


def processor_seconds_of(pids: Sequence[int]) -> float:
    """What processes have used so far, to the hundredth; not what their children have."""
    times = [psutil.Process(pid).cpu_times() for pid in pids]
    return sum(one.user + one.system for one in times)
