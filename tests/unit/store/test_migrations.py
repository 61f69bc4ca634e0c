"""Migrations lead to the schema that the rows declare, and can be run at every start."""

from __future__ import annotations

from pathlib import Path

import pytest
from alembic import command
from alembic.autogenerate import compare_metadata
from alembic.migration import MigrationContext
from alembic.util import CommandError
from sqlalchemy import text

from server.store.database import Database, sqlite_url
from server.store.migrate import alembic_config, migrate
from server.store.rows import Base
from tests.unit.store.material import RUN, SAMPLER, SESSION, add_parents


async def test_an_upgrade_from_nothing_is_the_declared_schema(db: Database):
    async with db.engine.connect() as connection:
        differences = await connection.run_sync(
            lambda sync: compare_metadata(
                MigrationContext.configure(sync, opts={"compare_type": True}), Base.metadata
            )
        )
    assert differences == []


async def test_upgrading_again_keeps_what_is_there(db: Database):
    await db.write(lambda session: add_parents(session, SESSION, RUN, SAMPLER))
    await migrate(db.engine)
    await migrate(db.engine)
    runs = await db.read(lambda session: session.scalars(text("SELECT id FROM runs")))
    assert list(runs) == [RUN]


async def test_every_step_can_be_taken_back(tmp_path: Path):
    db = Database(sqlite_url(tmp_path / "own.db"))
    await migrate(db.engine)
    async with db.engine.begin() as connection:
        await connection.run_sync(lambda sync: command.downgrade(alembic_config(sync), "base"))
    await migrate(db.engine)
    await db.stop()


async def test_data_of_a_newer_hearth_is_refused(db: Database):
    await db.write(lambda s: s.execute(text("UPDATE alembic_version SET version_num = '9999'")))
    with pytest.raises(CommandError, match="9999"):
        await migrate(db.engine)
