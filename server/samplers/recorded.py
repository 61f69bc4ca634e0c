"""Samples that are remembered for training: `record_stability_info` of a sample request."""

from __future__ import annotations

from collections.abc import Collection, Iterable

from sqlalchemy import delete, insert, select, update
from sqlalchemy.ext.asyncio import AsyncSession

from backends.contract import SampleResult
from server.core.ids import RequestId, sequence_ids
from server.core.records import Request, SamplingSession
from server.core.sequences import LIFETIME_S, RecordedSequence
from server.store.rows import columns, value
from server.store.sequence_rows import RecordedSequenceRow

_IDS_PER_QUERY = 500


def describe(
    sampler: SamplingSession, request: Request, prompt_length: int, result: SampleResult, now: float
) -> list[RecordedSequence]:
    """What is kept of a finished sample, by the ids its client got for the sequences."""
    ids = sequence_ids(RequestId(request.id), len(result.sequences))
    return [
        RecordedSequence(
            id=id_,
            owner=request.owner,
            session_id=sampler.session_id,
            prompt_length=prompt_length,
            tokens=sequence.tokens.astype("<i4", copy=False).tobytes(),
            logprobs=sequence.logprobs.astype("<f4", copy=False).tobytes(),
            expires_at=now + LIFETIME_S,
        )
        for id_, sequence in zip(ids, result.sequences, strict=True)
    ]


async def add(db: AsyncSession, sequences: Collection[RecordedSequence]) -> None:
    """The first record of a sequence stands, as the first outcome of its request does."""
    known = await find(db, [sequence.id for sequence in sequences])
    new = [columns(sequence) for sequence in sequences if sequence.id not in known]
    if new:
        await db.execute(insert(RecordedSequenceRow), new)


async def find(db: AsyncSession, ids: Iterable[str]) -> dict[str, RecordedSequence]:
    """Those that are remembered, expired ones too until they are swept away."""
    found: dict[str, RecordedSequence] = {}
    for some in _batches(ids):
        rows = await db.scalars(select(RecordedSequenceRow).where(RecordedSequenceRow.id.in_(some)))
        found |= {row.id: value(RecordedSequence, row) for row in rows}
    return found


async def renew(db: AsyncSession, ids: Iterable[str], now: float) -> None:
    """Being used starts their day again."""
    for some in _batches(ids):
        await db.execute(
            update(RecordedSequenceRow)
            .where(RecordedSequenceRow.id.in_(some))
            .values(expires_at=now + LIFETIME_S)
        )


async def remove_expired(db: AsyncSession, now: float) -> None:
    await db.execute(delete(RecordedSequenceRow).where(RecordedSequenceRow.expires_at <= now))


def _batches(ids: Iterable[str]) -> Iterable[list[str]]:
    """Databases limit how many values one statement takes."""
    ordered = sorted(ids)
    return [ordered[i : i + _IDS_PER_QUERY] for i in range(0, len(ordered), _IDS_PER_QUERY)]
