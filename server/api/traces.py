"""The trace of a session: building it, and the file behind its signed URL."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import FileResponse

from server.api.rooms import Caller, InRooms
from server.core.ids import SessionId

router = APIRouter()


@router.get("/sessions/{session_id}/trace_export")
async def trace_export(
    session_id: str, request: Request, rooms: InRooms, caller: Caller
) -> dict[str, Any]:
    """Polled until it is `ready` or `failed`."""
    session = await rooms.sessions.get(caller, SessionId(session_id))
    export = await rooms.traces.export(session)
    if export.error is not None:
        return {"status": "failed", "error": export.error}
    if export.file is None:
        return {"status": "pending"}
    base_url = str(request.base_url).rstrip("/")
    return {"status": "ready", "url": rooms.traces.url(export.file, base_url)}


@router.get("/traces/{name}")
async def download(name: str, expires: int, signature: str, rooms: InRooms) -> FileResponse:
    path = rooms.traces.open(name, expires, signature)
    return FileResponse(path, media_type="application/json")
