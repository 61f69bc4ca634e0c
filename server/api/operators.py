"""What only those may ask who can read the server's data folder (see `server/live.py`)."""

from __future__ import annotations

import secrets
from dataclasses import asdict
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Depends, Header, Response

from backends.contract import PauseMode
from server.api import metrics
from server.api.rooms import InRooms
from server.core.errors import NotAuthenticated
from server.core.ids import RunId


async def check_operator(rooms: InRooms, authorization: Annotated[str, Header()] = "") -> None:
    expected = f"Bearer {rooms.operator_token}"
    if not secrets.compare_digest(authorization.encode(), expected.encode()):
        raise NotAuthenticated("this needs the token that the server left in its data folder")


router = APIRouter(dependencies=[Depends(check_operator)], include_in_schema=False)


@router.get("/memory")
async def memory(rooms: InRooms) -> dict[str, Any]:
    """Of each trainer, bytes of its base model and of each run that it has in memory; the other
    runs are on disk."""
    return {name: asdict(report) for name, report in (await rooms.trainers.memory()).items()}


@router.get("/trainers")
async def trainers(rooms: InRooms) -> list[dict[str, Any]]:
    return [asdict(status) for status in rooms.trainers.statuses()]


@router.post("/trainers/{name}/drain")
async def drain_trainer(name: str, rooms: InRooms) -> dict[str, Any]:
    rooms.trainers.drain(name)
    return {}


@router.post("/trainers/{name}/resume")
async def resume_trainer(name: str, rooms: InRooms) -> dict[str, Any]:
    rooms.trainers.resume(name)
    return {}


@router.post("/runs/{run}/move")
async def move(run: str, rooms: InRooms, trainer: str | None = None) -> dict[str, Any]:
    """It goes at the end of the request that it is in."""
    return {"trainer": await rooms.trainers.move(RunId(run), trainer)}


@router.get("/samplers")
async def samplers(rooms: InRooms) -> list[dict[str, Any]]:
    return [asdict(worker) for worker in rooms.sampling_workers()]


@router.get("/replicas")
async def replicas(rooms: InRooms) -> list[dict[str, Any]]:
    return [{"model": model, **asdict(status)} for model, status in rooms.replicas.all()]


@router.post("/replicas/{name}/pause")
async def pause(name: str, rooms: InRooms, mode: PauseMode = "wait") -> dict[str, Any]:
    await rooms.replicas.pause(name, mode)
    return {}


@router.post("/replicas/{name}/drain")
async def drain(name: str, rooms: InRooms) -> dict[str, Any]:
    await rooms.replicas.drain(name)
    return {}


@router.post("/replicas/{name}/resume")
async def resume(name: str, rooms: InRooms) -> dict[str, Any]:
    await rooms.replicas.resume(name)
    return {}


@router.get("/maintenance")
async def maintenance(rooms: InRooms) -> dict[str, Any]:
    return {"on": rooms.maintenance}


@router.post("/maintenance/{switch}")
async def maintain(switch: Literal["on", "off"], rooms: InRooms) -> dict[str, Any]:
    """On: submissions are accepted and wait, what is under way goes on, nothing new begins."""
    rooms.maintain(switch == "on")
    return {"on": rooms.maintenance}


@router.get("/metrics")
async def prometheus(rooms: InRooms) -> Response:
    return Response(metrics.render(rooms), media_type=metrics.CONTENT_TYPE)
