"""custom losses"""

from collections.abc import Sequence

import sqlalchemy as sa
from alembic import op

revision: str = "0003"
down_revision: str | Sequence[str] | None = "0002"
branch_labels: str | Sequence[str] | None = None
depends_on: str | Sequence[str] | None = None


def upgrade() -> None:
    op.create_table(
        "custom_losses",
        sa.Column("id", sa.String(), nullable=False),
        sa.Column("session_id", sa.String(), nullable=False),
        sa.Column("owner", sa.String(), nullable=False),
        sa.Column("body", sa.LargeBinary(), nullable=False),
        sa.Column("created_at", sa.Double(), nullable=False),
        sa.ForeignKeyConstraint(
            ["session_id"], ["sessions.id"], name=op.f("fk_custom_losses_session_id_sessions")
        ),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_custom_losses")),
    )
    with op.batch_alter_table("custom_losses", schema=None) as batch_op:
        batch_op.create_index(
            batch_op.f("ix_custom_losses_session_id"), ["session_id"], unique=False
        )


def downgrade() -> None:
    with op.batch_alter_table("custom_losses", schema=None) as batch_op:
        batch_op.drop_index(batch_op.f("ix_custom_losses_session_id"))

    op.drop_table("custom_losses")
