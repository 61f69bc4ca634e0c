"""Alembic's entry: `migrate` runs it with an open connection."""

from alembic import context

from server.store import history_rows, loss_rows, sequence_rows  # noqa: F401 - the metadata's
from server.store.rows import Base

context.configure(
    connection=context.config.attributes["connection"],
    target_metadata=Base.metadata,
    render_as_batch=True,
)
with context.begin_transaction():
    context.run_migrations()
