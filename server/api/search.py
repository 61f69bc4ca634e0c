"""Searching sessions."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter

from server.api.checkpoints import time_text
from server.api.documented import takes
from server.api.rooms import Caller, InRooms, RawBody
from server.core.ids import user_urn
from server.core.limits import text_metadata
from server.core.records import Session, SessionStatus
from server.tenancy.search import Found, SearchSessions, cursor_after
from server.wire.json_shapes import parse_json

router = APIRouter()


@router.post("/sessions/search", openapi_extra=takes(SearchSessions))
async def search_sessions(rooms: InRooms, caller: Caller, body: RawBody) -> dict[str, Any]:
    found, more = await rooms.search.page(caller, parse_json(SearchSessions, body))
    answer: dict[str, Any] = {"sessions": [_summary(one) for one in found]}
    if more:
        answer["next_cursor"] = cursor_after(found[-1].session)
    return answer


def _summary(found: Found) -> dict[str, Any]:
    session = found.session
    summary: dict[str, Any] = {
        "session_id": session.id,
        "created_at": time_text(session.created_at),
        "owner": user_urn(session.owner),
        "project_id": session.project,
        "checkpoints_count": found.held.count,
        "checkpoint_storage_bytes": found.held.size_bytes,
        "user_metadata": text_metadata(session.user_metadata),
    }
    if session.display_name is not None:
        summary["display_name"] = session.display_name
    if (status := status_json(session)) is not None:
        summary["status"] = status
    return summary


def status_json(session: Session) -> dict[str, Any] | None:
    """None for a session that has gone silent: it neither finished nor is known to run."""
    match session.status:
        case SessionStatus.ACTIVE:
            return {"type": "active"}
        case SessionStatus.EXPIRED:
            return None
        case SessionStatus.FINISHED:
            status: dict[str, Any] = {
                "type": "client_finished",
                "reason": {"type": session.finish_reason},
            }
            if session.finish_detail is not None:
                status["detail"] = session.finish_detail
            return status
