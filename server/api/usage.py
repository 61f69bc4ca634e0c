"""What was used, by hour, and what is stored now. Nothing here has a price."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import datetime
from typing import Any

from fastapi import APIRouter

from server.api.checkpoints import time_text
from server.api.rooms import Caller, InRooms
from server.core.errors import BadInput
from server.core.ids import user_urn
from server.core.limits import text_metadata
from server.core.usage import Counts
from server.tenancy.tokens import email
from server.usage.queries import Bucket
from server.usage.service import HOUR_S

router = APIRouter(prefix="/billing/usage")

BYTES_PER_GIGABYTE = 1e9


@router.get("/events")
async def usage_events(
    rooms: InRooms, caller: Caller, starting_on: str, ending_before: str
) -> dict[str, Any]:
    since, before = _time("starting_on", starting_on), _time("ending_before", ending_before)
    buckets, sessions = await rooms.usage.buckets(caller.id, since, before)
    user = {"user_id": user_urn(caller.id), "user_name": caller.id}
    used = [(bucket, info) for bucket in buckets for info in _infos(bucket.counts)]
    used.sort(key=lambda one: (one[0].hour, -one[1].get("token_count", 0)))
    return {
        "data": [{**_envelope(bucket), **user, "event_info": info} for bucket, info in used],
        "sessions": {
            session: {"user_metadata": text_metadata(written)}
            for session, written in sessions.items()
        },
    }


@router.get("/checkpoints/current")
async def stored_checkpoints(
    rooms: InRooms, caller: Caller, project_id: str | None = None
) -> dict[str, Any]:
    return {
        "data": [
            {
                "project_id": stored.project,
                "org_user_urn": user_urn(caller.id),
                "user_email": email(caller),
                "user_name": caller.id,
                "checkpoint_count": stored.count,
                "size_bytes": stored.size_bytes,
                "size_gigabytes": stored.size_bytes / BYTES_PER_GIGABYTE,
            }
            for stored in await rooms.usage.stored(caller.id, project_id)
        ]
    }


def _time(name: str, text: str) -> float:
    try:
        moment = datetime.fromisoformat(text)
    except ValueError:
        moment = None
    if moment is None or moment.tzinfo is None:
        raise BadInput(f"{name} is {text[:40]!r}, which is not a time with a time zone (RFC 3339)")
    return moment.timestamp()


def _envelope(bucket: Bucket) -> dict[str, Any]:
    envelope: dict[str, Any] = {
        "bucket_start": time_text(bucket.hour * HOUR_S),
        "bucket_end": time_text((bucket.hour + 1) * HOUR_S),
        "base_model": bucket.base_model,
    }
    if bucket.session_id is not None:
        envelope["session_id"] = bucket.session_id
    if bucket.project is not None:
        envelope["project_id"] = bucket.project
    return envelope


def _infos(counts: Counts) -> Iterator[dict[str, Any]]:
    """One event a kind of usage that there was any of."""
    if counts.trained:
        yield {"type": "training", "token_count": counts.trained}
    if counts.prefilled:
        yield {"type": "sampling_prefill", "cached": False, "token_count": counts.prefilled}
    if counts.prefilled_cached:
        yield {"type": "sampling_prefill", "cached": True, "token_count": counts.prefilled_cached}
    if counts.sampled:
        yield {"type": "sampling_sample", "token_count": counts.sampled}
    if counts.checkpoints:
        yield {"type": "checkpoint", "count": counts.checkpoints}
