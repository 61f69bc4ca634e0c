"""Custom losses."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter

from server.api.documented import takes
from server.api.rooms import Caller, InRooms, RawBody
from server.api.training import promise
from server.losses.wire import CreateCustomLoss

router = APIRouter()


@router.post("/create_custom_loss", openapi_extra=takes(CreateCustomLoss))
async def create_custom_loss(rooms: InRooms, caller: Caller, body: RawBody) -> dict[str, Any]:
    rooms.check_open()
    return promise(await rooms.losses.create(caller, body))
