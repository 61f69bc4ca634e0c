"""What was promised: retrieve it, follow it, or give it up."""

from __future__ import annotations

from typing import Annotated, Any

import orjson
from fastapi import APIRouter, Header, Response
from fastapi.responses import JSONResponse
from pydantic import Field

from server.api.documented import takes
from server.api.rooms import Caller, InRooms, RawBody
from server.core.ids import CLONE_SIZE, RequestId, SamplingSessionId
from server.core.records import Request
from server.core.requests import State
from server.wire.json_results import AS_JSON
from server.wire.json_shapes import WireModel, parse_json
from server.wire.training import PROTOBUF_CONTENT_TYPE

JSON = "application/json"

router = APIRouter()


class RetrieveFuture(WireModel):
    request_id: str


class CompletionsTarget(WireModel):
    sampling_session_id: str
    cloned_sampler_id: int = Field(default=0, ge=0, le=CLONE_SIZE)


class RetrieveFutures(WireModel):
    target: CompletionsTarget
    prev_cursor: int = Field(default=0, ge=0, le=2**63 - 1)
    timeout: float | None = Field(default=None, ge=0)


@router.post("/retrieve_future", openapi_extra=takes(RetrieveFuture))
async def retrieve_future(
    rooms: InRooms,
    caller: Caller,
    body: RawBody,
    accept: Annotated[str, Header()] = "",
) -> Response:
    """The result; 200 with `error` for a failed request; 408 to try again."""
    id_ = RequestId(parse_json(RetrieveFuture, body).request_id)
    hold_s = 0.0 if rooms.draining else rooms.settings.long_poll_s
    request = await rooms.ledger.retrieve(id_, caller.id, hold_s)
    match request.state:
        case State.DONE:
            return _result(request, accept)
        case State.FAILED:
            return JSONResponse({"error": request.error, "category": request.error_category})
        case State.WAITING:
            state, reason = rooms.queue_state(request)
            answer = {"type": "try_again", "request_id": id_, "queue_state": state}
            if reason:
                answer["queue_state_reason"] = reason
            # Not for the SDK's retries of any call: its own poll reads the state, then comes back.
            return JSONResponse(answer, 408, {"x-should-retry": "false"})


def _result(request: Request, accept: str) -> Response:
    """As it is stored; as JSON for an SDK that does not read protobuf yet."""
    assert request.result is not None
    if request.kind in AS_JSON and PROTOBUF_CONTENT_TYPE not in accept:
        return Response(orjson.dumps(AS_JSON[request.kind](request.result)), media_type=JSON)
    return Response(request.result, media_type=request.result_type)


@router.post("/retrieve_futures", openapi_extra=takes(RetrieveFutures))
async def retrieve_futures(rooms: InRooms, caller: Caller, body: RawBody) -> dict[str, Any]:
    """Which samples of one client have finished since its cursor."""
    poll = parse_json(RetrieveFutures, body)
    sampler = SamplingSessionId(poll.target.sampling_session_id)
    await rooms.samplers.get(caller, sampler)
    longest = 0.0 if rooms.draining else rooms.settings.long_poll_s
    hold_s = longest if poll.timeout is None else min(poll.timeout, longest)
    completions, cursor = await rooms.ledger.completions(
        sampler, poll.target.cloned_sampler_id, poll.prev_cursor, hold_s
    )
    return {
        "completions": [
            {
                "state": "finished",
                "request_id": one.request,
                "response_payload_uncompressed_size": one.result_bytes,
            }
            if one.state is State.DONE
            else {"state": "failed", "request_id": one.request}
            for one in completions
        ],
        "cursor": cursor,
    }


@router.post("/cancel_future", openapi_extra=takes(RetrieveFuture))
async def cancel_future(rooms: InRooms, caller: Caller, body: RawBody) -> dict[str, Any]:
    await rooms.samplers.cancel(caller, RequestId(parse_json(RetrieveFuture, body).request_id))
    return {}
