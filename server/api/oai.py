"""OpenAI's API beside Tinker's: an application of its own under `/oai`, since every answer there,
errors too, has another form. It shares the state of the main application."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Coroutine
from typing import Annotated, Any, TypeVar

import orjson
import structlog
from fastapi import APIRouter, Depends, FastAPI, Request, Response
from fastapi.responses import JSONResponse, StreamingResponse
from sqlalchemy.exc import OperationalError
from starlette.exceptions import HTTPException
from starlette.types import Receive, Scope, Send

from server.api.documented import takes
from server.api.rooms import InRooms, RawBody, rooms_of
from server.core.errors import NotAuthenticated, ServiceError
from server.core.records import Tenant
from server.oai import errors
from server.oai.service import Job
from server.oai.wire import ChatBody, CompletionBody, parse

log = structlog.get_logger()
router = APIRouter(prefix="/api/v1")

Result = TypeVar("Result")
Json = dict[str, Any]

_BEARER = "bearer "
_DONE = b"data: [DONE]\n\n"


def install(app: FastAPI) -> None:
    """Mount the surface on the main application."""
    oai = FastAPI(title="Hearth, OpenAI's way")
    oai.state = app.state
    oai.include_router(router)
    _install_errors(oai)
    app.mount("/oai", oai)


async def get_caller(request: Request) -> Tenant:
    """Who is calling; raises NotAuthenticated."""
    given = request.headers.get("authorization", "")
    key = given[len(_BEARER) :].strip() if given.lower().startswith(_BEARER) else ""
    try:
        return await rooms_of(request).keys.authenticate(key or request.headers.get("x-api-key"))
    except NotAuthenticated:
        if key:
            raise
        raise NotAuthenticated("no API key: send it as Authorization: Bearer <key>") from None


Caller = Annotated[Tenant, Depends(get_caller)]


@router.get("/models")
async def list_models(rooms: InRooms, caller: Caller) -> Json:
    found = await rooms.oai.models.all(caller)
    return {"object": "list", "data": [model.json() for model in found]}


@router.get("/models/{name:path}")
async def get_model(name: str, rooms: InRooms, caller: Caller) -> Json:
    return (await rooms.oai.models.named(caller, name)).json()


@router.post("/chat/completions", openapi_extra=takes(ChatBody))
async def chat(request: Request, rooms: InRooms, caller: Caller, body: RawBody) -> Response:
    rooms.check_open()
    asked = parse(ChatBody, body)
    return await _answer(request, rooms, await rooms.oai.chat(caller, asked), asked.stream)


@router.post("/completions", openapi_extra=takes(CompletionBody))
async def completions(request: Request, rooms: InRooms, caller: Caller, body: RawBody) -> Response:
    rooms.check_open()
    asked = parse(CompletionBody, body)
    return await _answer(request, rooms, await rooms.oai.complete(caller, asked), asked.stream)


async def _answer(request: Request, rooms: InRooms, job: Job, stream: bool) -> Response:
    if not stream:
        answer = await _unless_gone(request, rooms.oai.answer(job))
        return Response(orjson.dumps(answer), media_type="application/json")
    chunks = rooms.oai.stream(job)
    # What fails before the first token still gets its own status.
    first = await _unless_gone(request, _next(chunks))
    return _EventStream(first, chunks)


async def _next(chunks: AsyncGenerator[Json]) -> Json:
    return await anext(chunks)


async def _unless_gone(request: Request, work: Coroutine[Any, Any, Result]) -> Result:
    """The work's result; it is cancelled when its client hangs up."""
    working = asyncio.create_task(work)
    listening = asyncio.create_task(_gone(request))
    try:
        await asyncio.wait([working, listening], return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise HTTPException(499, "the client closed the connection")
        return working.result()
    finally:
        working.cancel()
        listening.cancel()
        await asyncio.gather(working, listening, return_exceptions=True)


async def _gone(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


class _EventStream(StreamingResponse):
    """Server-sent events. However it ends, the generation ends with it."""

    media_type = "text/event-stream"

    def __init__(self, first: Json, chunks: AsyncGenerator[Json]) -> None:
        headers = {"cache-control": "no-cache", "x-accel-buffering": "no"}
        super().__init__(_events(first, chunks), headers=headers)
        self._chunks = chunks

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            await self._chunks.aclose()


async def _events(first: Json, chunks: AsyncGenerator[Json]) -> AsyncGenerator[bytes]:
    yield _event(first)
    try:
        async for chunk in chunks:
            yield _event(chunk)
    except ServiceError as error:
        yield _event(errors.error_body(error))
        return
    yield _DONE


def _event(data: Json) -> bytes:
    return b"data: " + orjson.dumps(data) + b"\n\n"


def _install_errors(app: FastAPI) -> None:
    @app.exception_handler(ServiceError)
    async def service_error(_: Request, error: ServiceError) -> JSONResponse:
        answer = _refusal(error.status, errors.error_body(error), retry=error.retry)
        answer.headers.update(error.headers)
        return answer

    @app.exception_handler(HTTPException)
    async def http_error(request: Request, error: HTTPException) -> JSONResponse:
        message = f"{request.method} {request.url.path[:200]}: {error.detail}"
        return _refusal(error.status_code, errors.body(error.status_code, message))

    @app.exception_handler(OperationalError)
    async def database_away(request: Request, error: OperationalError) -> JSONResponse:
        log.error("database_failed", path=request.url.path, why=str(error))
        return _refusal(
            503, errors.body(503, "the database is away; come back shortly"), retry=True
        )

    @app.exception_handler(Exception)
    async def unexpected(request: Request, error: Exception) -> JSONResponse:
        log.error("request_failed", path=request.url.path, exc_info=error)
        return _refusal(500, errors.body(500, "internal error; the server's log has the details"))


def _refusal(status: int, content: Json, *, retry: bool = False) -> JSONResponse:
    headers = {"x-should-retry": "true" if retry else "false"}
    return JSONResponse(content, status, headers)
