"""A service to call as several tenants, with its clock and its backend."""

from __future__ import annotations

import shutil
from collections.abc import AsyncGenerator
from pathlib import Path

import pytest
import pytest_asyncio

from tests.api.rest.service import NOON, Api, new_app
from tests.databases import Clock, empty_database
from tests.fake_backend import FakeBackend

__all__ = ["empty_database"]


@pytest.fixture
def clock() -> Clock:
    return Clock(NOON)


@pytest.fixture
def backend() -> FakeBackend:
    return FakeBackend()


@pytest_asyncio.fixture
async def local(
    tmp_path: Path, empty_database: Path, backend: FakeBackend, clock: Clock
) -> AsyncGenerator[Api]:
    """A server that no key was ever made for."""
    shutil.copy(empty_database, tmp_path / "hearth.db")
    app = new_app(tmp_path, backend, clock)
    async with app.router.lifespan_context(app):
        yield Api(app, clock)


@pytest_asyncio.fixture
async def alice(local: Api) -> Api:
    return await local.create_key("alice")


@pytest_asyncio.fixture
async def bob(local: Api, alice: Api) -> Api:
    return await local.create_key("bob")
