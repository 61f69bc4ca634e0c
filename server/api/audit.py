"""The audit log."""

from __future__ import annotations

from datetime import date
from typing import Any, Literal

from fastapi import APIRouter

from server.api.checkpoints import time_text
from server.api.rooms import Caller, InRooms
from server.audit.events import Event, Resource

router = APIRouter()

EventType = Literal["all", "checkpoints", "projects", "teams", "organizations"]


@router.get("/audit")
async def audit(
    rooms: InRooms, caller: Caller, event_type: EventType = "all", day: date | None = None
) -> dict[str, Any]:
    """What was done on one day (UTC, by default today) with what is the caller's."""
    resource = None if event_type == "all" else event_type
    events = await rooms.audit.of_day(caller.id, day, resource)
    return {"entries": [_entry(event) for event in events]}


def _entry(event: Event) -> dict[str, Any]:
    entry: dict[str, Any] = {
        "timestamp": time_text(event.at),
        "event": event.event,
        "event_details": event.details,
    }
    if event.resource is Resource.CHECKPOINTS:
        # Where SDKs before 0.36 look.
        entry["model_id"] = event.details["training_run_id"]
        entry["tinker_path"] = event.details["tinker_path"]
    if purpose := event.details.get("purpose"):
        entry["purpose"] = purpose
    return entry
