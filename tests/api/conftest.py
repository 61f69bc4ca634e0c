"""The whole service behind an HTTP client in this process, on a backend in memory."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from pathlib import Path

import pytest
import pytest_asyncio
from fastapi import FastAPI

from server.app import Service, create_app
from server.settings import Settings
from tests.api.client import Client
from tests.databases import Clock, data, empty_database
from tests.fake_backend import FakeBackend

__all__ = ["data", "empty_database"]

MODEL = "tiny/fake"


@pytest.fixture
def backend() -> FakeBackend:
    return FakeBackend()


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def settings(data: Path) -> Settings:
    return Settings(
        data=data,
        models={MODEL: Path("/models/fake")},
        long_poll_s=0.05,
        max_body_bytes=2**20,
        max_waiting_samples=3,
    )


@pytest.fixture(scope="session")
def app(tmp_path_factory: pytest.TempPathFactory) -> FastAPI:
    """The routes, made once, since that is slow; each test puts its own service behind them."""
    settings = Settings(data=tmp_path_factory.mktemp("routes"), models={})
    return create_app(settings, backends={MODEL: [FakeBackend()]})


@pytest_asyncio.fixture
async def client(
    app: FastAPI, settings: Settings, clock: Clock, backend: FakeBackend
) -> AsyncGenerator[Client]:
    service = Service(settings, clock, {MODEL: [backend]})
    await service.start()
    app.state.rooms = service.rooms
    async with Client(app) as client:
        yield client
    backend.let_go()
    await service.stop()
