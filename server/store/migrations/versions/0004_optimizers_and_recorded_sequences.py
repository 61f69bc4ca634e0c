"""optimizers of runs and checkpoints, recorded sequences"""

from collections.abc import Sequence

import sqlalchemy as sa
from alembic import op

revision: str = "0004"
down_revision: str | Sequence[str] | None = "0003"
branch_labels: str | Sequence[str] | None = None
depends_on: str | Sequence[str] | None = None

WITH_OPTIMIZER = ("runs", "checkpoints")
ADAMW = '{"type": "adamw"}'
"""What every run had before it could be chosen."""


def upgrade() -> None:
    op.create_table(
        "recorded_sequences",
        sa.Column("id", sa.String(), nullable=False),
        sa.Column("owner", sa.String(), nullable=False),
        sa.Column("session_id", sa.String(), nullable=False),
        sa.Column("prompt_length", sa.Integer(), nullable=False),
        sa.Column("tokens", sa.LargeBinary(), nullable=False),
        sa.Column("logprobs", sa.LargeBinary(), nullable=False),
        sa.Column("expires_at", sa.Double(), nullable=False),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_recorded_sequences")),
    )
    with op.batch_alter_table("recorded_sequences", schema=None) as batch_op:
        batch_op.create_index(
            batch_op.f("ix_recorded_sequences_expires_at"), ["expires_at"], unique=False
        )
    for table in WITH_OPTIMIZER:
        with op.batch_alter_table(table, schema=None) as batch_op:
            batch_op.add_column(
                sa.Column("optimizer", sa.JSON(), nullable=False, server_default=ADAMW)
            )


def downgrade() -> None:
    for table in WITH_OPTIMIZER:
        with op.batch_alter_table(table, schema=None) as batch_op:
            batch_op.drop_column("optimizer")
    with op.batch_alter_table("recorded_sequences", schema=None) as batch_op:
        batch_op.drop_index(batch_op.f("ix_recorded_sequences_expires_at"))
    op.drop_table("recorded_sequences")
