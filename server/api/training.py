"""Training runs: create, compute, step, save. Each handler journals a request and promises."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Request

from server.api.documented import takes
from server.api.rooms import Caller, InRooms, RawBody
from server.core.errors import BadInput
from server.core.ids import RunId
from server.core.records import Request as Job
from server.core.requests import Kind
from server.runs import wire
from server.wire.json_shapes import WireModel, parse_json
from server.wire.training import ForwardBackwardBody

router = APIRouter()


class GetInfo(WireModel):
    model_id: str


def promise(job: Job) -> dict[str, Any]:
    """What the client polls retrieve_future with."""
    answer: dict[str, Any] = {"request_id": job.id}
    if job.run_id is not None:
        answer["model_id"] = job.run_id
    return answer


@router.post("/create_model", openapi_extra=takes(wire.CreateModel))
async def create_model(rooms: InRooms, caller: Caller, body: RawBody) -> dict[str, Any]:
    rooms.check_open()
    return promise(await rooms.runs.create(caller, parse_json(wire.CreateModel, body), body))


@router.post("/load_weights", openapi_extra=takes(wire.LoadWeights))
async def load_weights(rooms: InRooms, caller: Caller, body: RawBody) -> dict[str, Any]:
    """Two forms: with a session it creates a run, with a run it replaces the run's state."""
    rooms.check_open()
    load = parse_json(wire.LoadWeights, body)
    if load.model_id is None:
        if load.session_id is None or load.model_seq_id is None:
            raise BadInput("load_weights needs session_id and model_seq_id, or model_id and seq_id")
        return promise(await rooms.runs.create_from_checkpoint(caller, load, body))
    return await _submit(rooms, caller, Kind.LOAD, body)


@router.post("/get_info", openapi_extra=takes(GetInfo))
async def get_info(rooms: InRooms, caller: Caller, body: RawBody) -> dict[str, Any]:
    run = await rooms.runs.get(caller, RunId(parse_json(GetInfo, body).model_id))
    return {
        "type": "get_info",
        "model_id": run.id,
        "model_name": run.base_model,
        "model_data": {
            "arch": "causal_lm",
            "model_name": run.base_model,
            "tokenizer_id": rooms.catalogue.get(run.base_model).tokenizer_id,
        },
        "is_lora": True,
        "lora_rank": run.lora.rank,
        "optimizer_config": run.optimizer.as_json(),
    }


@router.post("/forward_backward", openapi_extra=takes(ForwardBackwardBody, protobuf=True))
async def forward_backward(
    request: Request, rooms: InRooms, caller: Caller, body: RawBody
) -> dict[str, Any]:
    """Also `forward`: a flag in the body says which."""
    rooms.check_open()
    content_type = request.headers.get("content-type", "application/json")
    return promise(await rooms.runs.submit_pass(caller, body, content_type))


@router.post("/forward", openapi_extra=takes(ForwardBackwardBody, protobuf=True))
async def forward(
    request: Request, rooms: InRooms, caller: Caller, body: RawBody
) -> dict[str, Any]:
    """SDKs before 0.25."""
    return await forward_backward(request, rooms, caller, body)


@router.post("/optim_step", openapi_extra=takes(wire.OptimStepBody))
async def optim_step(rooms: InRooms, caller: Caller, body: RawBody) -> dict[str, Any]:
    return await _submit(rooms, caller, Kind.OPTIM_STEP, body)


@router.post("/save_weights", openapi_extra=takes(wire.SaveWeights))
async def save_weights(rooms: InRooms, caller: Caller, body: RawBody) -> dict[str, Any]:
    return await _submit(rooms, caller, Kind.SAVE, body)


@router.post("/save_weights_for_sampler", openapi_extra=takes(wire.SaveWeightsForSampler))
async def save_for_sampler(rooms: InRooms, caller: Caller, body: RawBody) -> dict[str, Any]:
    return await _submit(rooms, caller, Kind.SAVE_FOR_SAMPLER, body)


@router.post("/save_weights_external", openapi_extra=takes(wire.SaveWeightsExternal))
async def save_external(rooms: InRooms, caller: Caller, body: RawBody) -> dict[str, Any]:
    return await _submit(rooms, caller, Kind.SAVE_EXTERNAL, body)


async def _submit(rooms: InRooms, caller: Caller, kind: Kind, body: bytes) -> dict[str, Any]:
    rooms.check_open()
    envelope = parse_json(wire.RunRequest, body)
    return promise(await rooms.runs.submit(caller, kind, body, envelope))
