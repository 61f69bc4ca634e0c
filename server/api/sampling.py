"""Sampling sessions and samples."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter

from server.api.documented import takes
from server.api.rooms import Caller, InRooms, RawBody
from server.core.ids import SamplingSessionId, sequence_ids
from server.samplers.service import CreateSamplingSession
from server.wire.json_shapes import WireModel, parse_json
from server.wire.sampling import SampleBody

router = APIRouter()


class JoinSamplingSession(WireModel):
    sampling_session_id: str


@router.post("/create_sampling_session", openapi_extra=takes(CreateSamplingSession))
async def create_sampling_session(rooms: InRooms, caller: Caller, body: RawBody) -> dict[str, Any]:
    rooms.check_open()
    request = parse_json(CreateSamplingSession, body)
    sampler = await rooms.samplers.create(caller, request)
    return {"type": "create_sampling_session", "sampling_session_id": sampler.id}


@router.post("/join_sampling_session", openapi_extra=takes(JoinSamplingSession))
async def join_sampling_session(rooms: InRooms, caller: Caller, body: RawBody) -> dict[str, Any]:
    request = parse_json(JoinSamplingSession, body)
    sampler = SamplingSessionId(request.sampling_session_id)
    return {
        "type": "join_sampling_session",
        "client_counter": await rooms.samplers.join(caller, sampler),
    }


@router.get("/samplers/{sampler_id}")
async def get_sampler(sampler_id: str, rooms: InRooms, caller: Caller) -> dict[str, Any]:
    sampler = await rooms.samplers.get(caller, SamplingSessionId(sampler_id))
    answer = {"sampler_id": sampler.id, "base_model": sampler.base_model}
    if sampler.model_path is not None:
        answer["model_path"] = sampler.model_path
    return answer


@router.post("/asample", openapi_extra=takes(SampleBody))
async def asample(rooms: InRooms, caller: Caller, body: RawBody) -> dict[str, Any]:
    rooms.check_open()
    accepted = await rooms.samplers.submit(caller, body)
    return {
        "request_id": accepted.request,
        "sample_sequence_ids": sequence_ids(accepted.request, accepted.num_samples),
    }
