"""What the service asks the database about custom losses."""

from __future__ import annotations

from sqlalchemy import insert, select
from sqlalchemy.ext.asyncio import AsyncSession

from server.core.ids import SessionId, TenantId
from server.store.loss_rows import CustomLossRow


async def add(
    db: AsyncSession,
    loss_id: str,
    *,
    session: SessionId,
    owner: TenantId,
    body: bytes,
    created_at: float,
) -> None:
    values = {
        "id": loss_id,
        "session_id": session,
        "owner": owner,
        "body": body,
        "created_at": created_at,
    }
    await db.execute(insert(CustomLossRow).values(values))


async def body_of(db: AsyncSession, loss_id: str, session: SessionId) -> bytes | None:
    """The loss of that id, if it is the session's."""
    query = select(CustomLossRow.body).where(
        CustomLossRow.id == loss_id, CustomLossRow.session_id == session
    )
    return await db.scalar(query)
