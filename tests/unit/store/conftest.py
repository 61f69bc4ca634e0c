"""A database, and a ledger on it, for tests of the store."""

from __future__ import annotations

import pytest
import pytest_asyncio

from server.store.database import Database
from server.store.ledger import Ledger
from tests.databases import Clock, data, db, empty_database
from tests.unit.store.material import RUN, SAMPLER, SESSION, add_parents

__all__ = ["data", "db", "empty_database"]


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest_asyncio.fixture
async def ledger(db: Database, clock: Clock) -> Ledger:
    """Its database holds one session with a run and a sampler."""
    await db.write(lambda session: add_parents(session, SESSION, RUN, SAMPLER))
    ledger = Ledger(db, clock)
    await ledger.start()
    return ledger
