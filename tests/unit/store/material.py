"""Records for tests of the store."""

from __future__ import annotations

from sqlalchemy import insert
from sqlalchemy.ext.asyncio import AsyncSession

from server.core.ids import RunId, SamplingSessionId, SessionId, TenantId, request_id
from server.core.records import LoraShape, Request, Run, SamplerKind, SamplingSession, Session
from server.core.requests import Kind
from server.runs import queries as run_queries
from server.samplers import queries as sampler_queries
from server.store.rows import SessionRow, columns

ME = TenantId("me")
OTHER = TenantId("other")
SESSION = SessionId("session-1")
RUN = RunId("session-1:train:0")
SAMPLER = SamplingSessionId("session-1:sample:0")
SHAPE = LoraShape(rank=4, alpha=4.0, seed=1, train_attn=True, train_mlp=True, train_unembed=True)


def run(id_: RunId = RUN, owner: TenantId = ME, created_at: float = 0.0) -> Run:
    return Run(
        id=id_,
        session_id=SESSION,
        owner=owner,
        project="default",
        base_model="tiny/fake",
        lora=SHAPE,
        user_metadata={},
        created_at=created_at,
        last_request_at=created_at,
    )


async def add_parents(
    db: AsyncSession, session: SessionId, run_: RunId, sampler: SamplingSessionId
) -> None:
    record = Session(
        id=session,
        owner=ME,
        project="default",
        tags=[],
        user_metadata={},
        sdk_version="0",
        display_name=None,
        created_at=0.0,
        last_heartbeat_at=0.0,
    )
    await db.execute(insert(SessionRow).values(columns(record) | {"idempotency_key": None}))
    await run_queries.add(db, run(run_))
    on_base = SamplingSession(
        id=sampler,
        session_id=session,
        owner=ME,
        base_model="tiny/fake",
        kind=SamplerKind.BASE,
        created_at=0.0,
    )
    await sampler_queries.add(db, on_base)


def request(seq: int, kind: Kind = Kind.FORWARD_BACKWARD, payload: bytes = b"body") -> Request:
    return Request(
        id=request_id(RUN, seq),
        kind=kind,
        owner=ME,
        seq=seq,
        run_id=RUN,
        payload=payload,
        created_at=float(seq),
    )


def sample(seq: int) -> Request:
    return Request(
        id=request_id(SAMPLER, seq),
        kind=Kind.SAMPLE,
        owner=ME,
        seq=seq,
        sampling_session_id=SAMPLER,
        payload=b"prompt",
        created_at=float(seq),
    )
