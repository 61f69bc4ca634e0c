"""Custom losses: graphs that a client uploads once and then names in its requests."""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import replace
from reprlib import repr as brief

from backends.contract import BackendError, CustomLoss, ForwardBackward
from server.core.errors import BadInput, TooLarge, Unavailable
from server.core.ids import SessionId, custom_loss_id, request_id
from server.core.records import Request, Tenant
from server.core.requests import Kind, State
from server.losses import queries
from server.losses.wire import CreateCustomLoss, loss_of, read_loss
from server.store.database import AsyncSession, Database
from server.store.ledger import Ledger
from server.tenancy.sessions import Sessions
from server.wire.json_shapes import parse_json

NAME = "custom"
"""The `loss_fn` of a request that names one."""
MAX_BODY_BYTES = 2**20

Check = Callable[[CustomLoss], Awaitable[str | None]]
"""Why a backend cannot run the loss, or None; raises BackendError."""


class CustomLosses:
    """`checks` are those of all base models served: a session may train any of them."""

    def __init__(
        self,
        ledger: Ledger,
        sessions: Sessions,
        checks: Mapping[str, Check],
        clock: Callable[[], float],
    ) -> None:
        self._ledger = ledger
        self._sessions = sessions
        self._checks = checks
        self._clock = clock

    async def create(self, tenant: Tenant, body: bytes) -> Request:
        """Store a loss. A graph that is not allowed makes a failed future; a retry finds what
        came of the first attempt. Raises NotFound or Gone for the session."""
        if len(body) > MAX_BODY_BYTES:
            raise TooLarge(f"the loss has {len(body)} bytes; the limit is {MAX_BODY_BYTES}")
        asked = parse_json(CreateCustomLoss, body)
        session = await self._sessions.open(tenant, SessionId(asked.session_id))
        loss_id = custom_loss_id(session.id)
        now = self._clock()
        why = await self._refusal(asked)
        request = Request(
            id=request_id(loss_id, asked.custom_loss_seq_id),
            kind=Kind.CUSTOM_LOSS,
            owner=tenant.id,
            seq=asked.custom_loss_seq_id,
            created_at=now,
            finished_at=now,
        )
        if why is not None:
            error = f"create_custom_loss: {asked.name[:80]}: {why}"
            request = replace(request, state=State.FAILED, error=error, error_category="user")
            return (await self._ledger.submit(request))[0]
        result = json.dumps({"type": "create_custom_loss", "loss_id": request.id}).encode()

        async def add(db: AsyncSession) -> None:
            await queries.add(
                db,
                request.id,
                session=session.id,
                owner=tenant.id,
                body=body,
                created_at=now,
            )

        done = replace(request, state=State.DONE, result=result, result_type="application/json")
        return (await self._ledger.submit(done, also=add))[0]

    async def _refusal(self, asked: CreateCustomLoss) -> str | None:
        try:
            loss = loss_of(asked)
            for check in self._checks.values():
                if why := await check(loss):
                    return why
        except BadInput as error:
            return str(error)
        except BackendError as error:
            raise Unavailable(f"the loss cannot be checked now: {error}") from error
        return None


async def with_loss(
    db: Database, request: ForwardBackward, session: SessionId | None
) -> ForwardBackward:
    """The request with the graph of the custom loss that it names, if it names one. Raises
    BadInput when that is none of its session's."""
    if request.loss != NAME:
        return request
    loss_id = request.loss_config.get("loss_id")
    if not isinstance(loss_id, str) or len(request.loss_config) != 1:
        raise BadInput(
            f"loss_fn_config: has {', '.join(map(brief, request.loss_config)) or 'nothing'}; "
            f"{NAME} takes loss_id, which create_custom_loss gives, and nothing else."
        )
    if session is None or not loss_id.isascii():
        body = None
    else:
        body = await db.read(lambda reading: queries.body_of(reading, loss_id, session))
    if body is None:
        raise BadInput(
            f"loss_fn_config['loss_id']: {brief(loss_id)} is no custom loss of this run's session."
        )
    return replace(request, custom_loss=read_loss(body), loss_config={})
