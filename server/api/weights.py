"""What is said of a checkpoint by its path, and copying one into a project."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import APIRouter, Header

from server.api.documented import takes
from server.api.rooms import Caller, IdempotencyKey, InRooms, RawBody, Rooms
from server.core.errors import NotFound
from server.core.paths import CheckpointPath, parse_path
from server.core.records import Checkpoint, Tenant
from server.wire.json_shapes import WireModel, parse_json

router = APIRouter()

AccessToken = Annotated[str | None, Header(alias="x-tinker-weights-access-token")]


class WeightsInfo(WireModel):
    tinker_path: str


class CopyWeights(WireModel):
    source_path: str
    destination_project_id: str
    ttl_seconds: int | None = None


@router.post("/weights_info", openapi_extra=takes(WeightsInfo))
async def weights_info(rooms: InRooms, caller: Caller, body: RawBody) -> dict[str, Any]:
    path = parse_path(parse_json(WeightsInfo, body).tinker_path)
    found = await rooms.checkpoints.readable(caller.id, path)
    return {
        "base_model": found.base_model,
        "is_lora": True,
        "lora_rank": found.lora.rank,
        "train_unembed": found.lora.train_unembed,
        "train_mlp": found.lora.train_mlp,
        "train_attn": found.lora.train_attn,
        "optimizer_config": found.optimizer.as_json(),
    }


@router.post("/copy_weights", openapi_extra=takes(CopyWeights))
async def copy_weights(
    rooms: InRooms,
    caller: Caller,
    body: RawBody,
    idempotency_key: IdempotencyKey = None,
    access_token: AccessToken = None,
) -> dict[str, Any]:
    copy = parse_json(CopyWeights, body)
    source = await _source(rooms, caller, parse_path(copy.source_path), access_token)
    target = await rooms.runs.add_holder(
        caller, source, copy.destination_project_id, idempotency_key
    )
    copied = await rooms.checkpoints.copy(source, target, copy.ttl_seconds)
    return {"tinker_path": str(copied.path)}


async def _source(
    rooms: Rooms, caller: Tenant, path: CheckpointPath, access_token: str | None
) -> Checkpoint:
    """What the caller may read, or whoever's key the access token is."""
    try:
        return await rooms.checkpoints.readable(caller.id, path)
    except NotFound:
        if access_token is None:
            raise
    holder = await rooms.keys.authenticate(access_token)
    return await rooms.checkpoints.readable(holder.id, path)
