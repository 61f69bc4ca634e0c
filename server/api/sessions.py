"""Sessions."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from fastapi import APIRouter
from pydantic import Field

from server.api.documented import takes
from server.api.rooms import AccessScope, Caller, IdempotencyKey, InRooms, Limit, Offset, RawBody
from server.core.ids import SessionId
from server.core.limits import text_metadata
from server.tenancy.sessions import CreateSession
from server.wire.json_shapes import WireModel, parse_json

router = APIRouter()


class Heartbeat(WireModel):
    session_id: str


class FinishReason(WireModel):
    type: Literal["success", "errored", "interrupted"] = "success"


class Finish(WireModel):
    reason: FinishReason = FinishReason()
    detail: str | None = None


class AssignProject(WireModel):
    project_id: Annotated[str, Field(min_length=1, max_length=200)]


@router.post("/create_session", openapi_extra=takes(CreateSession))
async def create_session(
    rooms: InRooms, caller: Caller, body: RawBody, idempotency_key: IdempotencyKey = None
) -> dict[str, str]:
    rooms.check_open()
    request = parse_json(CreateSession, body)
    session = await rooms.sessions.create(caller, request, idempotency_key)
    return {"type": "create_session", "session_id": session.id}


@router.post("/session_heartbeat", openapi_extra=takes(Heartbeat))
async def heartbeat(rooms: InRooms, caller: Caller, body: RawBody) -> dict[str, str]:
    await rooms.sessions.heartbeat(caller, SessionId(parse_json(Heartbeat, body).session_id))
    return {"type": "session_heartbeat"}


@router.post("/sessions/{session_id}/finish", openapi_extra=takes(Finish))
async def finish(session_id: str, rooms: InRooms, caller: Caller, body: RawBody) -> dict[str, Any]:
    how = parse_json(Finish, body)
    await rooms.sessions.finish(caller, SessionId(session_id), how.reason.type, how.detail)
    rooms.release(SessionId(session_id))
    return {}


@router.get("/sessions")
async def list_sessions(
    rooms: InRooms,
    caller: Caller,
    limit: Limit = 20,
    offset: Offset = 0,
    access_scope: AccessScope = "owned",
) -> dict[str, Any]:
    sessions = await rooms.sessions.page(caller, limit, offset)
    return {"sessions": [session.id for session in sessions]}


@router.get("/sessions/{session_id}")
async def get_session(
    session_id: str, rooms: InRooms, caller: Caller, access_scope: AccessScope = "owned"
) -> dict[str, Any]:
    session = await rooms.sessions.get(caller, SessionId(session_id))
    runs = await rooms.runs.of_session(session.id)
    samplers = await rooms.samplers.of_session(session.id)
    answer: dict[str, Any] = {
        "training_run_ids": [run.id for run in runs],
        "sampler_ids": [sampler.id for sampler in samplers],
        "user_metadata": text_metadata(session.user_metadata),
    }
    if session.display_name is not None:
        answer["display_name"] = session.display_name
    return answer


@router.put("/sessions/{session_id}/project", openapi_extra=takes(AssignProject))
async def assign_project(
    session_id: str, rooms: InRooms, caller: Caller, body: RawBody
) -> dict[str, Any]:
    project = parse_json(AssignProject, body).project_id
    await rooms.sessions.assign_project(caller, SessionId(session_id), project)
    rooms.move(SessionId(session_id), project)
    return {}
