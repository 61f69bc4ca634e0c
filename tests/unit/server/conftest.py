"""A data folder with a database."""

from __future__ import annotations

import pytest

from tests.databases import Clock, data, db, empty_database

__all__ = ["data", "db", "empty_database"]


@pytest.fixture
def clock() -> Clock:
    return Clock()
