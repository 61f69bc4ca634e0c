"""Errors in the words of OpenAI's API."""

from __future__ import annotations

from typing import Any

from server.core.errors import BadInput, NotAuthenticated, NotFound, ServiceError


class BadParameter(BadInput):
    """A parameter that cannot be carried out as it is."""

    def __init__(self, message: str, param: str | None, code: str | None = None) -> None:
        super().__init__(message)
        self.param = param
        self.code = code


class UnknownModel(NotFound):
    """No such base model or checkpoint, or one that belongs to somebody else."""

    def __init__(self, name: str) -> None:
        super().__init__(f"The model {name[:200]!r} does not exist or you do not have access to it")
        self.param = "model"
        self.code = "model_not_found"


class GenerationFailed(ServiceError):
    """The engine refused or broke, and asking again would not help."""


class EngineLost(ServiceError):
    """The engine died; another one is on its way."""

    status = 503
    retry = True


def error_body(error: ServiceError) -> dict[str, Any]:
    code = getattr(error, "code", None)
    if isinstance(error, NotAuthenticated):
        code = "invalid_api_key"
    elif error.status == 429:
        code = "rate_limit_exceeded"
    return body(error.status, str(error), getattr(error, "param", None), code)


def body(
    status: int, message: str, param: str | None = None, code: str | None = None
) -> dict[str, Any]:
    """An error as OpenAI's clients read it."""
    if status == 429:
        kind = "rate_limit_error"
    elif status >= 500:
        kind = "server_error"
    else:
        kind = "invalid_request_error"
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}
