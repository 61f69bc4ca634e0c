"""Checkpoint archives, for SDKs up to 0.35."""

from __future__ import annotations

from datetime import UTC, datetime
from email.utils import format_datetime

from fastapi import APIRouter, Request, Response
from fastapi.responses import StreamingResponse

from server.api.checkpoints import path_of
from server.api.rooms import Caller, InRooms
from server.audit.events import of_read
from server.checkpoints.archive import archive_bytes, stream

router = APIRouter()


@router.get("/training_runs/{run_id}/checkpoints/{kind}/{name}/archive")
async def archive(
    run_id: str, kind: str, name: str, request: Request, rooms: InRooms, caller: Caller
) -> Response:
    """Sends the client to a URL that needs no key."""
    checkpoint = await rooms.checkpoints.readable(caller.id, path_of(run_id, kind, name))
    url, expires = rooms.downloads.archive_url(checkpoint, str(request.base_url).rstrip("/"))
    await rooms.audit.record(of_read(caller.id, checkpoint, rooms.ledger.now(), "archive"))
    expiry = format_datetime(datetime.fromtimestamp(expires, UTC), usegmt=True)
    return Response(status_code=302, headers={"Location": url, "Expires": expiry})


@router.get("/archives/{folder}")
@router.head("/archives/{folder}", include_in_schema=False)
async def download_archive(
    folder: str, expires: int, signature: str, request: Request, rooms: InRooms
) -> Response:
    files = rooms.downloads.archive(folder, expires, signature)
    await rooms.checkpoints.check_stands(folder)
    headers = {"Content-Length": str(archive_bytes(files))}
    if request.method == "HEAD":
        return Response(headers=headers, media_type="application/x-tar")
    return StreamingResponse(stream(files), headers=headers, media_type="application/x-tar")
