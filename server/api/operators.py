"""What only those may ask who can read the server's data folder (see `server/live.py`)."""

from __future__ import annotations

import secrets
from dataclasses import asdict
from typing import Annotated, Any

from fastapi import APIRouter, Depends, Header

from server.api.rooms import InRooms
from server.core.errors import NotAuthenticated


async def check_operator(rooms: InRooms, authorization: Annotated[str, Header()] = "") -> None:
    expected = f"Bearer {rooms.operator_token}"
    if not secrets.compare_digest(authorization.encode(), expected.encode()):
        raise NotAuthenticated("this needs the token that the server left in its data folder")


router = APIRouter(dependencies=[Depends(check_operator)], include_in_schema=False)


@router.get("/memory")
async def memory(rooms: InRooms) -> dict[str, Any]:
    """Bytes of each base model and of each run that is in memory; the other runs are on disk."""
    return {name: asdict(report) for name, report in (await rooms.memory()).items()}
