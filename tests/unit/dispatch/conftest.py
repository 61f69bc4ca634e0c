"""A workplace with a fresh database."""

from __future__ import annotations

from pathlib import Path

import pytest

from server.store.database import Database
from tests.databases import Clock, data, db, empty_database
from tests.fake_backend import FakeBackend
from tests.unit.dispatch.workplace import Workplace

__all__ = ["data", "db", "empty_database"]


@pytest.fixture
def place(db: Database, data: Path) -> Workplace:
    return Workplace(db, data, FakeBackend(), Clock())
