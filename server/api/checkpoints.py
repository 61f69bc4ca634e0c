"""Checkpoints and training runs over REST: list, publish, expire, delete, copy, download."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import FileResponse

from server.api.documented import takes
from server.api.rooms import (
    AccessScope,
    Caller,
    InRooms,
    Limit,
    Offset,
    RawBody,
    Rooms,
)
from server.audit.events import of_read
from server.core.ids import RunId, user_urn
from server.core.paths import CheckpointKind, CheckpointPath, check_name, parse_kind
from server.core.records import Checkpoint, Run
from server.wire.json_shapes import WireModel, parse_json

router = APIRouter()


Newest = Mapping[tuple[RunId, CheckpointKind], Checkpoint]

_TYPES = {
    CheckpointKind.TRAINING: "training",
    CheckpointKind.SAMPLER: "sampler",
    CheckpointKind.EXTERNAL: "external",
}


class SetTtl(WireModel):
    ttl_seconds: int | None = None


def time_text(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).isoformat().replace("+00:00", "Z")


def checkpoint_json(checkpoint: Checkpoint) -> dict[str, Any]:
    answer: dict[str, Any] = {
        "checkpoint_id": f"{checkpoint.kind}/{checkpoint.name}",
        "checkpoint_type": _TYPES[checkpoint.kind],
        "time": time_text(checkpoint.created_at),
        "tinker_path": str(checkpoint.path),
        "size_bytes": checkpoint.size_bytes,
        "public": checkpoint.public,
    }
    if checkpoint.user_metadata:
        answer["user_metadata"] = checkpoint.user_metadata
    if checkpoint.expires_at is not None:
        answer["expires_at"] = time_text(checkpoint.expires_at)
    return answer


async def runs_json(rooms: Rooms, runs: Sequence[Run]) -> list[dict[str, Any]]:
    newest = await rooms.checkpoints.newest([run.id for run in runs])
    return [_run_json(run, newest) for run in runs]


def _run_json(run: Run, newest: Newest) -> dict[str, Any]:
    answer: dict[str, Any] = {
        "training_run_id": run.id,
        "base_model": run.base_model,
        "model_owner": user_urn(run.owner),
        "is_lora": True,
        "corrupted": False,
        "lora_rank": run.lora.rank,
        "last_request_time": time_text(run.last_request_at),
        "user_metadata": run.user_metadata,
    }
    for field, kind in (
        ("last_checkpoint", CheckpointKind.TRAINING),
        ("last_sampler_checkpoint", CheckpointKind.SAMPLER),
    ):
        if checkpoint := newest.get((run.id, kind)):
            answer[field] = checkpoint_json(checkpoint)
    return answer


@router.get("/training_runs")
async def list_runs(
    rooms: InRooms,
    caller: Caller,
    limit: Limit = 20,
    offset: Offset = 0,
    project_id: str | None = None,
    access_scope: AccessScope = "owned",
) -> dict[str, Any]:
    runs, total = await rooms.runs.page(caller, limit, offset, project_id)
    return {
        "training_runs": await runs_json(rooms, runs),
        "cursor": {"offset": offset, "limit": limit, "total_count": total},
    }


@router.get("/training_runs/{run_id}")
async def get_run(
    run_id: str, rooms: InRooms, caller: Caller, access_scope: AccessScope = "owned"
) -> dict[str, Any]:
    run = await rooms.runs.get(caller, RunId(run_id))
    return (await runs_json(rooms, [run]))[0]


@router.get("/training_runs/{run_id}/checkpoints")
async def list_run_checkpoints(run_id: str, rooms: InRooms, caller: Caller) -> dict[str, Any]:
    run = await rooms.runs.get(caller, RunId(run_id))
    found = await rooms.checkpoints.of_run(run.id)
    return {"checkpoints": [checkpoint_json(checkpoint) for checkpoint in found]}


@router.get("/checkpoints")
async def list_checkpoints(
    rooms: InRooms, caller: Caller, limit: Limit = 100, offset: Offset = 0
) -> dict[str, Any]:
    found, total = await rooms.checkpoints.page(caller.id, limit, offset)
    return {
        "checkpoints": [checkpoint_json(checkpoint) for checkpoint in found],
        "cursor": {"offset": offset, "limit": limit, "total_count": total},
    }


def path_of(run_id: str, kind: str, name: str) -> CheckpointPath:
    return CheckpointPath(RunId(run_id), parse_kind(kind), check_name(name))


_ONE = "/training_runs/{run_id}/checkpoints/{kind}/{name}"


@router.post(_ONE + "/publish")
async def publish(
    run_id: str, kind: str, name: str, rooms: InRooms, caller: Caller
) -> dict[str, Any]:
    await rooms.checkpoints.publish(caller.id, path_of(run_id, kind, name), public=True)
    return {}


@router.delete(_ONE + "/publish")
async def unpublish(
    run_id: str, kind: str, name: str, rooms: InRooms, caller: Caller
) -> dict[str, Any]:
    await rooms.checkpoints.publish(caller.id, path_of(run_id, kind, name), public=False)
    return {}


@router.put(_ONE + "/ttl", openapi_extra=takes(SetTtl))
async def set_ttl(
    run_id: str, kind: str, name: str, rooms: InRooms, caller: Caller, body: RawBody
) -> dict[str, Any]:
    ttl = parse_json(SetTtl, body).ttl_seconds
    await rooms.checkpoints.set_ttl(caller.id, path_of(run_id, kind, name), ttl)
    return {}


@router.delete(_ONE)
async def delete(
    run_id: str, kind: str, name: str, rooms: InRooms, caller: Caller
) -> dict[str, Any]:
    await rooms.checkpoints.delete(caller.id, path_of(run_id, kind, name))
    return {}


@router.get(_ONE + "/external_weights_urls")
async def external_weights_urls(
    run_id: str, kind: str, name: str, request: Request, rooms: InRooms, caller: Caller
) -> dict[str, Any]:
    path = path_of(run_id, kind, name)
    checkpoint = await rooms.checkpoints.owned(caller.id, path)
    urls, expires = rooms.downloads.urls(checkpoint, str(request.base_url).rstrip("/"))
    await rooms.audit.record(of_read(caller.id, checkpoint, rooms.ledger.now(), "download"))
    return {"urls": urls, "expires": time_text(expires)}


@router.get("/files/{folder}/{name}")
async def download(
    folder: str, name: str, expires: int, signature: str, rooms: InRooms
) -> FileResponse:
    file = rooms.downloads.open(folder, name, expires, signature)
    await rooms.checkpoints.check_stands(folder)
    return FileResponse(file)
