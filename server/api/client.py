"""What a client asks before it does anything: is it there, what does it serve, which flags."""

from __future__ import annotations

import re
from typing import Any

from fastapi import APIRouter, Request

from server.api.documented import takes
from server.api.rooms import Caller, InRooms, RawBody, receive
from server.wire.json_shapes import WireModel, parse_json

router = APIRouter()

_WHOAMI_SINCE = (0, 30)


class ClientConfig(WireModel):
    sdk_version: str = ""


def knows_whoami(body: bytes) -> bool:
    """Whether the SDK has a use for a token: older ones go on with their key alone."""
    version = parse_json(ClientConfig, body or b"{}").sdk_version
    numbers = re.match(r"(\d{1,9})\.(\d{1,9})", version, re.ASCII)
    return numbers is not None and tuple(map(int, numbers.groups())) >= _WHOAMI_SINCE


@router.get("/healthz")
async def healthz() -> dict[str, str]:
    return {"status": "ok"}


@router.post("/client/config", openapi_extra=takes(ClientConfig))
async def client_config(rooms: InRooms, caller: Caller, body: RawBody) -> dict[str, Any]:
    """Flags of the SDK. Chunks of a batch come one after the other, so that a missing number
    means a request that will never come; they may still arrive in any order."""
    return {
        "pjwt_auth_enabled": rooms.settings.jwt and knows_whoami(body),
        "parallel_fwdbwd_chunks": False,
        "proto_compress_fwdbwd": False,
        "sample_max_concurrent_requests": min(2000, rooms.settings.max_waiting_samples),
        "sample_join_sampling_session": True,
        "create_model_via_load_weights": True,
        "proto_write_fwdbwd": True,
        "fwd_via_fwdbwd": True,
        "custom_loss_server_side": True,
    }


@router.post("/client/dynamic_config")
async def dynamic_config(caller: Caller) -> dict[str, Any]:
    return {
        "refresh_interval_sec": 300,
        "sample_cancel_enabled": True,
        "sample_cancel_max_batch_size": 64,
    }


@router.get("/get_server_capabilities")
async def capabilities(rooms: InRooms, caller: Caller) -> dict[str, Any]:
    return {
        "supported_models": [
            {
                "model_name": model.name,
                "max_context_length": model.info.max_context_length,
                "trainable": True,
                "sampleable": True,
            }
            for model in rooms.catalogue
        ]
    }


@router.post("/telemetry")
async def telemetry(request: Request) -> dict[str, str]:
    """Accepted at once and kept nowhere, not even in memory: it can hold prompts and headers."""
    async for _ in receive(request):
        pass
    return {"status": "accepted"}
