"""A migrated database for each test, copied from one that is made once."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import AsyncGenerator
from pathlib import Path

import pytest
import pytest_asyncio

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


@pytest_asyncio.fixture
async def db(empty_database: Path, tmp_path: Path) -> AsyncGenerator[Database]:
    shutil.copy(empty_database, tmp_path / "hearth.db")
    database = Database(sqlite_url(tmp_path / "hearth.db"))
    database.start()
    yield database
    await database.stop()


class Clock:
    """Time that stands still until a test moves it."""

    def __init__(self, now: float = 1_000_000.0) -> None:
        self.now = now

    def __call__(self) -> float:
        return self.now
