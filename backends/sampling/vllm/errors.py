"""How a call to a replica can end badly."""

from __future__ import annotations

from backends.contract import Failure
from backends.sampling.requests import DIVERGED

_NAN_IN_JSON = "Out of range float values are not JSON compliant"
"""What vLLM says when a prompt's logprobs are nan."""


class ReplicaLost(Exception):
    """The replica did not answer, or its engine is dead: the request may be sent elsewhere."""


class Refused(Exception):
    """The replica answered that it will not do this."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status
        self.message = message

    def failure(self) -> Failure:
        if _NAN_IN_JSON in self.message:
            return DIVERGED
        category = "user" if self.status == 400 else "server"
        return Failure(message=f"vLLM refused the request: {self.message}", category=category)


class RequestFailed(Exception):
    """This request fails alone."""

    def __init__(self, failure: Failure) -> None:
        super().__init__(failure.message)
        self.failure = failure
