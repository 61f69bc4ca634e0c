"""Runs and checkpoints that are older than the choice of an optimizer have AdamW."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from alembic import command
from sqlalchemy import text

from server.checkpoints import queries as checkpoint_queries
from server.core.optimizers import ADAMW, Optimizer
from server.core.paths import parse_path
from server.runs import queries as run_queries
from server.store.database import Database, sqlite_url
from server.store.migrate import alembic_config, migrate
from tests.unit.store.material import RUN, run

OLD = (
    "INSERT INTO runs (id, owner, project, base_model, lora, user_metadata, created_at,"
    " last_request_at) VALUES (:run, 'me', 'p', 'm', :lora, '{}', 0, 0)",
    "INSERT INTO checkpoints (run_id, kind, name, owner, project, base_model, lora, folder,"
    " size_bytes, created_at, public, user_metadata)"
    " VALUES (:run, 'weights', 'a', 'me', 'p', 'm', :lora, 'f', 1, 0, 0, '{}')",
)
LORA = (
    '{"rank": 4, "alpha": 4.0, "seed": 1, "train_attn": true, "train_mlp": true,'
    ' "train_unembed": true}'
)


async def test_what_was_there_before_has_adamw(tmp_path: Path):
    db = Database(sqlite_url(tmp_path / "old.db"))
    async with db.engine.begin() as connection:
        await connection.run_sync(lambda sync: command.upgrade(alembic_config(sync), "0003"))
        for statement in OLD:
            await connection.execute(text(statement), {"run": RUN, "lora": LORA})
    await migrate(db.engine)
    found = await db.read(lambda session: run_queries.find(session, RUN))
    path = parse_path(f"tinker://{RUN}/weights/a")
    saved = await db.read(lambda session: checkpoint_queries.find(session, path))
    await db.engine.dispose()
    assert found is not None
    assert saved is not None
    assert found.optimizer == saved.optimizer == ADAMW


async def test_an_optimizer_with_a_version_comes_back_as_it_was(db: Database):
    dimuon = Optimizer(type="dimuon", version=1)

    async def add_and_read(session):
        await run_queries.add(session, replace(run(), session_id=None, optimizer=dimuon))
        session.expire_all()
        return await run_queries.find(session, RUN)

    found = await db.write(add_and_read)
    assert found.optimizer == dimuon
