"""Usage of calls that are not journaled."""

from __future__ import annotations

from dataclasses import asdict

from sqlalchemy import insert
from sqlalchemy.ext.asyncio import AsyncSession

from server.core.ids import TenantId
from server.core.requests import Kind
from server.core.usage import Counts, Sampled
from server.store.history_rows import UsageRow


async def add_sampled(
    db: AsyncSession, request: str, owner: TenantId, base_model: str, hour: int, cost: Sampled
) -> None:
    """Store what a sample without a session used."""
    counts = Counts(
        prefilled=cost.prompt - cost.cached,
        prefilled_cached=cost.cached,
        sampled=cost.generated,
    )
    row = {"request_id": request, "kind": Kind.SAMPLE.value, "owner": owner, "session_id": None}
    await db.execute(
        insert(UsageRow).values(**row, base_model=base_model, hour=hour, **asdict(counts))
    )
