"""Usage: what each request cost, stored in the commit that stores its result.

So a request is counted exactly once, however often it was sent, and one that failed is not
counted at all. A pass counts the tokens that went through the model, with a gradient or without:
both keep the device from others, and the stored kind tells them apart. The prompt of a sample
counts once, whatever the number of its sequences.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import orjson

from server.core.errors import BadInput
from server.core.ids import SessionId, TenantId
from server.core.records import Request
from server.core.requests import PASS_KINDS, Kind
from server.core.usage import Counts
from server.store.database import AsyncSession, Database
from server.store.ledger import Outcome
from server.usage import queries
from server.usage.queries import Bucket, Stored

HOUR_S = 3600
MAX_HOURS = 14 * 24
_SAVES = frozenset({Kind.SAVE, Kind.SAVE_FOR_SAMPLER, Kind.SAVE_EXTERNAL})


class Usage:
    def __init__(self, db: Database, clock: Callable[[], float]) -> None:
        self._db = db
        self._clock = clock

    async def record(self, db: AsyncSession, request: Request, outcome: Outcome) -> None:
        """For `Ledger.listen`: count a request whose outcome is being stored."""
        if counts := counts_of(request, outcome):
            finished_at = request.finished_at or self._clock()
            await queries.add(db, request, counts, int(finished_at // HOUR_S))

    async def buckets(
        self, tenant: TenantId, since: float, before: float
    ) -> tuple[list[Bucket], dict[SessionId, dict[str, Any]]]:
        """Usage by hour, and the metadata of the sessions in it. Raises BadInput for a window
        that is not of whole hours, or too long."""
        first, end = _hour("starting_on", since), _hour("ending_before", before)
        if not 0 < end - first <= MAX_HOURS:
            raise BadInput(
                f"ending_before is {end - first} hours after starting_on; "
                f"it must be from 1 to {MAX_HOURS} (14 days)"
            )

        async def read(db: AsyncSession) -> tuple[list[Bucket], dict[SessionId, dict[str, Any]]]:
            found = await queries.buckets(db, tenant, first, end)
            return found, await queries.metadata(db, tenant, first, end)

        return await self._db.read(read)

    async def stored(self, tenant: TenantId, project: str | None) -> list[Stored]:
        """What the tenant's checkpoints take now, by project."""
        now = self._clock()
        return await self._db.read(lambda db: queries.stored(db, tenant, project, now))


def counts_of(request: Request, outcome: Outcome) -> Counts:
    """What a finished request is charged with."""
    if outcome.error is not None:
        return Counts()
    if request.kind in PASS_KINDS:
        return Counts(trained=request.tokens)
    if (sampled := outcome.sampled) is not None:
        return Counts(
            prefilled=sampled.prompt - sampled.cached,
            prefilled_cached=sampled.cached,
            sampled=sampled.generated,
        )
    if request.kind in _SAVES and outcome.result is not None:
        # A sampler that was published without a name is no checkpoint.
        return Counts(checkpoints=int("path" in orjson.loads(outcome.result)))
    return Counts()


def _hour(name: str, seconds: float) -> int:
    if seconds % HOUR_S:
        raise BadInput(f"{name} is not at a full hour, UTC")
    return int(seconds // HOUR_S)
