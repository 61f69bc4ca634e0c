"""What the handlers call: the rooms of the service, and how a handler gets at them."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Annotated, Literal

from fastapi import Depends, Header, Query, Request

from server.audit.service import Audit
from server.catalogue import Catalogue
from server.checkpoints.downloads import Downloads
from server.checkpoints.service import Checkpoints
from server.core.errors import ShuttingDown, TooLarge, TooSlow
from server.core.ids import SessionId
from server.core.records import Request as Job
from server.core.records import Tenant
from server.dispatch.trainers import Trainers
from server.losses.service import CustomLosses
from server.oai.service import OpenAI
from server.replicas import Replicas
from server.runs.service import Runs
from server.samplers.service import Samplers
from server.settings import Settings
from server.store.ledger import Ledger
from server.tenancy.keys import Keys
from server.tenancy.search import SessionSearch
from server.tenancy.sessions import Sessions
from server.traces.service import Traces
from server.usage.service import Usage
from server.wire.body import decode_body

_BULKY = (
    "/forward_backward",
    "/forward",
    "/asample",
    "/chat/completions",
    "/completions",
    "/telemetry",
)
_SMALL_BODY_BYTES = 4 * 2**20
_SLOWEST_BYTES_PER_S = 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingWorker:
    """A worker that samples a base model beside a trainer that does not."""

    model: str
    alive: bool
    generation: int
    """How often it was started."""


@dataclass(slots=True, kw_only=True)
class Rooms:
    settings: Settings
    catalogue: Catalogue
    keys: Keys
    sessions: Sessions
    runs: Runs
    losses: CustomLosses
    samplers: Samplers
    oai: OpenAI
    checkpoints: Checkpoints
    downloads: Downloads
    ledger: Ledger
    search: SessionSearch
    usage: Usage
    audit: Audit
    traces: Traces
    trainers: Trainers
    replicas: Replicas
    hold: Callable[[bool], None]
    """Have nothing new begin, or have it begin again."""
    sampling_workers: Callable[[], Sequence[SamplingWorker]]
    operator_token: str
    """Whoever shows it may look into the server (`api/operators.py`)."""
    draining: bool = False
    """No new work is taken; what was promised can still be asked for."""

    maintenance: bool = False
    """What comes is accepted, and nothing new begins."""

    def maintain(self, on: bool) -> None:
        """Those who wait are told at once."""
        self.maintenance = on
        self.hold(on)
        self.ledger.wake_all()

    def drain(self) -> None:
        """From now on no new work; those who wait are told to come back."""
        self.draining = True
        self.ledger.wake_all()

    def release(self, session: SessionId) -> None:
        """A session is over: its runs' tensors can be freed."""
        for live in self.runs.registry.of_session(session):
            self.trainers.release(live.run)

    def move(self, session: SessionId, project: str) -> None:
        """A session belongs to another project now, and what its runs save from now on too."""
        for live in self.runs.registry.of_session(session):
            live.run = replace(live.run, project=project)

    def queue_state(self, request: Job) -> tuple[str, str | None]:
        """What a waiting client is told: the SDK's queue state, and a reason."""
        if self.draining:
            return "paused_capacity", "the server is restarting"
        if self.maintenance:
            return "paused_capacity", "maintenance"
        held_up = self.runs.registry.held_up
        if request.run_id is not None and (reason := held_up(request.run_id)) is not None:
            return "paused_capacity", reason
        model = self.samplers.base_model_of(request)
        if (reason := self.replicas.held_up(model, request.id)) is not None:
            return "paused_capacity", reason
        return "active", None

    def check_open(self) -> None:
        if self.draining:
            raise ShuttingDown("the server is shutting down; try again after its restart")


async def get_rooms(request: Request) -> Rooms:
    # Async, although it waits for nothing: FastAPI would send a plain function to a thread.
    return rooms_of(request)


def rooms_of(request: Request) -> Rooms:
    return request.app.state.rooms


async def get_caller(request: Request) -> Tenant:
    """Who is calling; raises NotAuthenticated."""
    return await rooms_of(request).keys.authenticate(request.headers.get("x-api-key"))


InRooms = Annotated[Rooms, Depends(get_rooms)]
Caller = Annotated[Tenant, Depends(get_caller)]


async def receive(request: Request) -> AsyncGenerator[bytes]:
    """The body as it comes; raises TooSlow when it stands still, or drips so that it never ends."""
    patience = rooms_of(request).settings.body_timeout_s
    start, received = time.monotonic(), 0
    parts = request.stream()
    while True:
        late = start + patience + received / _SLOWEST_BYTES_PER_S - time.monotonic()
        try:
            async with asyncio.timeout(min(patience, late)):
                part = await anext(parts, None)
        except TimeoutError:
            raise TooSlow(
                f"the request body came too slowly after {received} bytes; it may stand still for "
                f"{patience:g} seconds and then needs {_SLOWEST_BYTES_PER_S} bytes a second"
            ) from None
        if part is None:
            return
        received += len(part)
        yield part


def _body_limit(request: Request) -> int:
    """Few calls carry data; for the others a large body is a mistake, or meant to hurt."""
    most = rooms_of(request).settings.max_body_bytes
    return most if request.url.path.endswith(_BULKY) else min(most, _SMALL_BODY_BYTES)


async def get_body(request: Request) -> bytes:
    """The request's body, unpacked; raises TooLarge before more than the limit is in memory."""
    limit = _body_limit(request)
    too_large = TooLarge(f"the request body is larger than {limit} bytes")
    if _announced_bytes(request) > limit:
        raise too_large
    parts: list[bytes] = []
    received = 0
    async for part in receive(request):
        received += len(part)
        if received > limit:
            raise too_large
        parts.append(part)
    body = b"".join(parts)
    encoding = request.headers.get("content-encoding")
    unpack = partial(decode_body, body, encoding, max_bytes=limit, max_decoded_bytes=limit)
    # Off the loop however small it looks: what it unpacks to may be large.
    return unpack() if encoding is None else await asyncio.to_thread(unpack)


def _announced_bytes(request: Request) -> int:
    announced = request.headers.get("content-length", "")
    return int(announced) if announced.isdecimal() and len(announced) < 20 else 0


RawBody = Annotated[bytes, Depends(get_body)]
IdempotencyKey = Annotated[str | None, Header(alias="x-idempotency-key")]
AccessScope = Annotated[Literal["owned", "accessible"], Query()]
"""The tenants of a server see nothing of each other, so the two are the same here."""
Limit = Annotated[int, Query(ge=1, le=1000)]
Offset = Annotated[int, Query(ge=0, le=2**63 - 1)]
