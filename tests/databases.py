"""A migrated database for each test, copied from one that is made once."""

from __future__ import annotations

import asyncio
import logging
import shutil
import tempfile
from collections.abc import AsyncGenerator, Iterator
from pathlib import Path

import pytest
import pytest_asyncio
import structlog

from server.store.database import Database, sqlite_url
from server.store.migrate import migrate


@pytest.fixture(scope="session")
def empty_database(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A file at the newest schema, to be copied."""
    path = tmp_path_factory.mktemp("database") / "hearth.db"

    async def make() -> None:
        db = Database(sqlite_url(path))
        await migrate(db.engine)
        async with db.engine.connect() as connection:
            await connection.exec_driver_sql("PRAGMA wal_checkpoint(TRUNCATE)")
        await db.stop()

    asyncio.run(make())
    return path


@pytest.fixture
def data(empty_database: Path) -> Iterator[Path]:
    """A data folder with a database, in memory where that can be had: a flush costs nothing."""
    shared = Path("/dev/shm")
    with tempfile.TemporaryDirectory(dir=shared if shared.is_dir() else None) as folder:
        shutil.copy(empty_database, Path(folder) / "hearth.db")
        yield Path(folder)


@pytest_asyncio.fixture
async def db(data: Path) -> AsyncGenerator[Database]:
    database = Database(sqlite_url(data / "hearth.db"))
    database.start()
    yield database
    await database.stop()


class Clock:
    """Time that stands still until a test moves it."""

    def __init__(self, now: float = 1_000_000.0) -> None:
        self.now = now

    def __call__(self) -> float:
        return self.now


# What is worth reading when a test fails; a line for every pass makes the suite a fifth slower.
structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.WARNING))
