"""Every error a client can see: its status, whose mistake it is, and whether to try again.

The SDK retries 408, 409, 429 and 5xx on its own unless `x-should-retry` says otherwise, so a
mistake of the caller must never wear one of those.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import ClassVar, Literal

Category = Literal["user", "server"]


class ServiceError(Exception):
    """The root: `str(error)` is one sentence that a client may read."""

    status: ClassVar[int] = 500
    category: ClassVar[Category] = "server"
    retry: ClassVar[bool] = False
    headers: ClassVar[Mapping[str, str]] = MappingProxyType({})


class BadInput(ServiceError):
    """The request cannot be carried out as it is: names the field, the value and the limit."""

    status = 400
    category = "user"


class NotAuthenticated(ServiceError):
    """The API key is missing or unknown."""

    status = 401
    category = "user"


class InvalidToken(NotAuthenticated):
    """The JWT has expired or is not ours: the SDK gets another one for its key and goes on."""

    headers = MappingProxyType({"WWW-Authenticate": 'Bearer error="invalid_token"'})


class NotFound(ServiceError):
    """No such resource, or one that belongs to somebody else: the two look alike."""

    status = 404
    category = "user"


class Gone(ServiceError):
    """It existed and is over: an expired future, a finished session."""

    status = 410
    category = "user"


class TooSlow(ServiceError):
    """The body stopped coming: a fault of the way here more than of the caller, so sending it
    again may help. The SDK does so for some minutes and then gives up."""

    status = 408
    category = "user"
    retry = True
    headers = MappingProxyType({"Connection": "close"})


class TooLarge(ServiceError):
    """The body, or what it unpacks to, is above the limit."""

    status = 413
    category = "user"


class QueueFull(ServiceError):
    """Too much is waiting; come back shortly."""

    status = 429
    category = "user"
    retry = True


class PassesFull(QueueFull):
    """As much training data waits as may. The SDK asks ten times this far apart, and goes on
    while 300 seconds have not passed: it is patient for more than 8 minutes."""

    headers = MappingProxyType({"Retry-After": "25"})


class Unavailable(ServiceError):
    """What computes is being started again; come back shortly."""

    status = 503
    retry = True


class ShuttingDown(ServiceError):
    """The service is draining and takes no new work; another start will."""

    status = 503
    retry = True
