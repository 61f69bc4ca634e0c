"""Jobs for tests of the scheduler."""

from __future__ import annotations

from server.core.ids import RequestId, RunId, TenantId
from server.core.requests import PASS_KINDS, Job, Kind


def job(
    seq: int,
    kind: Kind = Kind.FORWARD_BACKWARD,
    lengths: tuple[int, ...] = (10,),
    *,
    run: str = "run",
    tenant: str | None = None,
) -> Job:
    return Job(
        request=RequestId(f"{run}:{seq}"),
        run=RunId(run),
        tenant=TenantId(tenant or run.split("-")[0]),
        seq=seq,
        kind=kind,
        lengths=lengths if kind in PASS_KINDS else (),
    )
