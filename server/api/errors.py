"""Errors to answers: one place that knows how the SDK reads them.

Every answer has a body (an empty 400 reads as a fault of a proxy) and says whether to try again
(the SDK would repeat 408, 409, 429 and 5xx on its own).
"""

from __future__ import annotations

import structlog
from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from sqlalchemy.exc import OperationalError
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect

from server.core.errors import ServiceError

log = structlog.get_logger()


def install(app: FastAPI) -> None:
    @app.exception_handler(ServiceError)
    async def service_error(_: Request, error: ServiceError) -> JSONResponse:
        answer = _answer(error.status, str(error), error.category, retry=error.retry)
        answer.headers.update(error.headers)
        return answer

    @app.exception_handler(RequestValidationError)
    async def invalid(_: Request, error: RequestValidationError) -> JSONResponse:
        first = error.errors()[0]
        field = ".".join(str(part) for part in first["loc"])
        return _answer(400, f"{field}: {first['msg']}", "user", retry=False)

    @app.exception_handler(HTTPException)
    async def http_error(request: Request, error: HTTPException) -> JSONResponse:
        detail = f"{request.method} {request.url.path[:200]}: {error.detail}"
        return _answer(error.status_code, detail, "user", retry=False)

    @app.exception_handler(ClientDisconnect)
    async def gone_away(_: Request, __: ClientDisconnect) -> JSONResponse:
        # Nobody reads this; without it, every client that is killed would fill the log.
        return _answer(400, "the client went away before its request was here", "user", retry=True)

    @app.exception_handler(OperationalError)
    async def database_away(request: Request, error: OperationalError) -> JSONResponse:
        log.error("database_failed", path=request.url.path, why=str(error))
        return _answer(503, "the database is away; come back shortly", "server", retry=True)

    @app.exception_handler(Exception)
    async def unexpected(request: Request, error: Exception) -> JSONResponse:
        log.error("request_failed", path=request.url.path, exc_info=error)
        return _answer(
            500, "internal error; the server's log has the details", "server", retry=False
        )


def _answer(status: int, detail: str, category: str, *, retry: bool) -> JSONResponse:
    headers = {"x-should-retry": "true" if retry else "false"}
    return JSONResponse({"detail": detail, "category": category}, status, headers)
