"""Training runs: create them, and accept requests on them into the journal."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections import Counter
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace

import structlog

from backends.contract import AdapterSpec, ForwardBackward
from server.catalogue import Catalogue
from server.checkpoints.service import Checkpoints
from server.core.errors import BadInput, PassesFull
from server.core.ids import (
    RunId,
    SessionId,
    TenantId,
    holder_id,
    new_folder_name,
    request_id,
    run_id,
)
from server.core.limits import text_metadata
from server.core.optimizers import Optimizer
from server.core.paths import parse_path
from server.core.records import Checkpoint, LoraShape, Request, Run, Tenant
from server.core.requests import Kind, State
from server.losses.service import with_loss
from server.runs import queries, wire
from server.runs.custom_validation import check_pass
from server.runs.operations import Operation, decode, decode_body
from server.runs.optimizers import chosen, resumed
from server.runs.recorded import Found, Recorded
from server.runs.registry import LiveRun, Registry, Stored
from server.runs.validation import check_adapter_spec
from server.store import journal
from server.store.database import AsyncSession
from server.store.ledger import Also, Ledger, Outcome
from server.tenancy.sessions import Sessions
from server.wire.recorded import RECORDED_CONTENT_TYPE, join, with_logprobs
from server.wire.training import ContentRefused, TrainingSubmission, decode_training

JSON = "application/json"
_LARGE_BODY_BYTES = 128 * 1024
_TOUCH_EVERY_S = 10.0
"""How exact a run's last_request_at is kept: a write of it with every request is not worth it."""

log = structlog.get_logger()


class Runs:
    """`wake` tells whoever trains a run that there is something to do."""

    def __init__(
        self,
        *,
        ledger: Ledger,
        sessions: Sessions,
        checkpoints: Checkpoints,
        catalogue: Catalogue,
        lora_alpha: float | None,
        max_pass_bytes: int,
        room_wait_s: float = 10.0,
        clock: Callable[[], float],
        wake: Callable[[LiveRun], None],
        refuse_stable_reinforce: bool = False,
    ) -> None:
        self._ledger = ledger
        self._sessions = sessions
        self._checkpoints = checkpoints
        self._catalogue = catalogue
        self._lora_alpha = lora_alpha
        self._max_pass_bytes = max_pass_bytes
        self._room_wait_s = room_wait_s
        self._arriving_bytes: Counter[TenantId] = Counter()
        self._clock = clock
        self._wake = wake
        self._recorded = Recorded(ledger.db, clock, refuse=refuse_stable_reinforce)
        self.registry = Registry(self._fetch)

    async def create(self, tenant: Tenant, body: wire.CreateModel, payload: bytes) -> Request:
        """A new run with a fresh adapter; retrying returns the first attempt's request."""
        optimizer = chosen(body.optimizer_config)
        model = self._catalogue.get(body.base_model)
        config = body.lora_config
        lora = LoraShape(
            rank=config.rank,
            alpha=self._lora_alpha or float(config.rank),
            seed=secrets.randbits(31) if config.seed is None else config.seed % 2**63,
            train_attn=config.train_attn,
            train_mlp=config.train_mlp,
            train_unembed=config.train_unembed,
        )
        check_adapter_spec(adapter_spec(lora), model.info)
        return await self._start(tenant, body, model.name, lora, optimizer, Kind.CREATE, payload)

    async def create_from_checkpoint(
        self, tenant: Tenant, body: wire.LoadWeights, payload: bytes
    ) -> Request:
        """A new run that starts where a checkpoint was saved, with that checkpoint's shape."""
        decode_body(Kind.LOAD, payload, JSON)
        source = await self._checkpoints.readable(tenant.id, parse_path(body.path))
        if body.base_model is not None and body.base_model != source.base_model:
            raise BadInput(
                f"base_model is {body.base_model[:100]!r}; the checkpoint was trained on "
                f"{source.base_model!r}"
            )
        check_adapter_spec(adapter_spec(source.lora), self._catalogue.get(source.base_model).info)
        optimizer = resumed(source, with_state=body.optimizer, config=body.optimizer_config)
        return await self._start(
            tenant, body, source.base_model, source.lora, optimizer, Kind.LOAD, payload
        )

    async def submit(
        self, tenant: Tenant, kind: Kind, body: bytes, envelope: wire.RunRequest
    ) -> Request:
        """Journal a request on a run and queue it.

        Raises NotFound, Gone (the session is over), or BadInput; the seq_id of a refused request
        is used up, so that nobody waits for it.
        """
        live = await self._open(tenant, envelope.model_id)
        request = self._request(tenant, live.run, envelope.seq_id, kind, body, JSON)
        try:
            operation = decode_body(kind, body, JSON)
        except BadInput as error:
            await self._refuse(live, request, str(error))
            raise
        return await self._accept(live, request, operation)

    async def submit_pass(self, tenant: Tenant, body: bytes, content_type: str) -> Request:
        """A forward or forward_backward. Content that cannot be computed makes a failed future,
        which is how the SDK tells its user about data; only an unreadable body is BadInput. Raises
        PassesFull when too much of the tenant's waits."""
        try:
            submission = await _decode_aside(body, content_type)
        except ContentRefused as error:
            live = await self._open(tenant, error.envelope.model_id)
            seq, kind = error.envelope.seq_id, Kind.FORWARD_BACKWARD
            request = self._request(tenant, live.run, seq, kind, body, content_type)
            return await self._refuse(live, request, str(error))
        live = await self._open(tenant, submission.model_id)
        operation = submission.request
        kind = Kind.FORWARD_BACKWARD if operation.backward else Kind.FORWARD
        request = replace(
            self._request(tenant, live.run, submission.seq_id, kind, body, content_type),
            tokens=operation.num_tokens,
        )
        async with self._room(live, request):
            return await self._submit_pass(live, request, submission)

    async def _submit_pass(
        self, live: LiveRun, request: Request, submission: TrainingSubmission
    ) -> Request:
        info = self._catalogue.get(live.run.base_model).info
        found: Found | None = None
        try:
            operation = await with_loss(self._ledger.db, submission.request, live.run.session_id)
            signature = info.losses.get(operation.loss)
            self._recorded.check_served(operation.loss, signature)
            check_pass(operation, info)
            if signature is not None and signature.recorded:
                found = await self._recorded.find(live.run, submission)
        except BadInput as error:
            return await self._refuse(live, request, str(error))
        if found is None:
            return await self._accept(live, request, operation)
        return await self._accept_recorded(live, request, operation, found)

    async def of_session(self, session: SessionId) -> list[Run]:
        return await self._ledger.db.read(lambda db: queries.of_session(db, session))

    async def page(
        self, tenant: Tenant, limit: int, offset: int, project: str | None
    ) -> tuple[list[Run], int]:
        return await self._ledger.db.read(
            lambda db: queries.page(db, tenant.id, limit, offset, project)
        )

    async def add_holder(
        self, tenant: Tenant, source: Checkpoint, project: str, idempotency_key: str | None
    ) -> Run:
        """A run that only holds copied checkpoints: they need a path of their owner's own. A
        repeated request gets the first one's."""
        now = self._clock()
        run = Run(
            id=holder_id(tenant.id, idempotency_key or new_folder_name()),
            session_id=None,
            owner=tenant.id,
            project=project,
            base_model=source.base_model,
            lora=source.lora,
            user_metadata={},
            created_at=now,
            last_request_at=now,
            optimizer=source.optimizer,
        )
        return await self._ledger.db.write(lambda db: queries.add(db, run))

    async def _open(self, tenant: Tenant, model_id: str) -> LiveRun:
        """A run that may take requests. Raises NotFound, or Gone when its session is over."""
        live = await self.registry.get(RunId(model_id), tenant.id)
        if live.run.session_id is None:
            raise BadInput(f"model_id {model_id!r} holds copied checkpoints; it cannot be trained")
        if live.creation_error is not None:
            raise BadInput(f"model_id {model_id!r} was never created: {live.creation_error}")
        self._catalogue.get(live.run.base_model)
        await self._sessions.open(tenant, live.run.session_id)
        return live

    @asynccontextmanager
    async def _room(self, live: LiveRun, request: Request) -> AsyncGenerator[None]:
        """Holds a place for a pass until it is queued. Raises PassesFull when the tenant may not
        have that much more waiting, and no room was made for a while: the client would come back
        only after longer and longer pauses, in which the device may run dry."""
        owner, num_bytes = request.owner, len(request.payload or b"")
        ends = time.monotonic() + self._room_wait_s
        while not self._fits(live, request):
            with self.registry.finished.listen(owner) as ring:
                rung = await ring.within(ends - time.monotonic())
                if not rung and not self._fits(live, request):
                    raise PassesFull(
                        f"{self._waiting_bytes(owner)} bytes of training data are waiting already, "
                        f"of {self._max_pass_bytes} at most; come back shortly"
                    )
        self._arriving_bytes[owner] += num_bytes
        try:
            yield
        finally:
            self._arriving_bytes[owner] -= num_bytes

    def _fits(self, live: LiveRun, request: Request) -> bool:
        """What was accepted before, or is what others wait for, always does."""
        waiting = self._waiting_bytes(request.owner)
        fits = waiting + len(request.payload or b"") <= self._max_pass_bytes
        expected = request.id in live.pending or live.queue.holds_up(request.seq)
        return not waiting or fits or expected

    def _waiting_bytes(self, owner: TenantId) -> int:
        return self.registry.pass_bytes(owner) + self._arriving_bytes[owner]

    async def _refuse(self, live: LiveRun, request: Request, why: str) -> Request:
        """Journal a request that will not run, with its error."""
        failed = replace(
            request,
            payload=None,
            state=State.FAILED,
            finished_at=self._clock(),
            error=why,
            error_category="user",
        )
        stored, new = await self._ledger.submit(failed)
        if new:
            live.queue.refuse(request.seq)
            self._wake(live)
        return stored

    async def resume(self, unfinished: list[Request]) -> None:
        """After a restart: queue again what the last process had accepted."""
        now = self._clock()
        for request in unfinished:
            if request.run_id is None:
                continue
            live = await self.registry.get(request.run_id, None)
            if live.run.base_model not in self._catalogue:
                log.warning("request_left_waiting", request=request.id, model=live.run.base_model)
                continue
            try:
                operation = decode(request)
                if isinstance(operation, ForwardBackward):
                    operation = await with_loss(self._ledger.db, operation, live.run.session_id)
            except BadInput as error:
                # Accepted by an older version whose rules differed.
                outcome = Outcome(error=str(error), error_category="user")
                await self._ledger.finish(request, outcome)
                continue
            self.registry.push(live, request, operation, now)
            self._wake(live)

    async def get(self, tenant: Tenant, run: RunId) -> Run:
        return (await self.registry.get(run, tenant.id)).run

    async def _start(
        self,
        tenant: Tenant,
        body: wire.CreateModel | wire.LoadWeights,
        base_model: str,
        lora: LoraShape,
        optimizer: Optimizer,
        kind: Kind,
        payload: bytes,
    ) -> Request:
        assert body.session_id is not None
        assert body.model_seq_id is not None
        session = await self._sessions.open(tenant, SessionId(body.session_id))
        now = self._clock()
        run = Run(
            id=run_id(session.id, body.model_seq_id),
            session_id=session.id,
            owner=tenant.id,
            project=session.project,
            base_model=base_model,
            lora=lora,
            user_metadata=text_metadata(body.user_metadata),
            created_at=now,
            last_request_at=now,
            optimizer=optimizer,
        )

        async def add_run(db: AsyncSession) -> None:
            await queries.add(db, run)

        request = self._request(tenant, run, 0, kind, payload, JSON)
        stored, new = await self._ledger.submit(request, also=add_run)
        if new:
            live = self.registry.add(run)
            self.registry.push(live, stored, decode(stored), now)
            self._wake(live)
        return stored

    async def _accept(
        self, live: LiveRun, request: Request, operation: Operation, also: Also | None = None
    ) -> Request:
        now = self._clock()
        stale = now - live.run.last_request_at >= _TOUCH_EVERY_S

        async def touch(db: AsyncSession) -> None:
            if also is not None:
                await also(db)
            if stale:
                await queries.change(db, live.run.id, last_request_at=now)

        stored, new = await self._ledger.submit(request, also=touch if stale or also else None)
        if new and stale:
            live.run = replace(live.run, last_request_at=now)
        if new:
            self.registry.push(live, stored, operation, now)
            self._wake(live)
        return stored

    async def _accept_recorded(
        self, live: LiveRun, request: Request, operation: ForwardBackward, found: Found
    ) -> Request:
        """A pass together with what was recorded for it, which lives on for that."""
        payload = join(request.payload or b"", found.logprobs)
        return await self._accept(
            live,
            replace(request, payload=payload, payload_type=RECORDED_CONTENT_TYPE),
            with_logprobs(operation, found.logprobs),
            also=lambda db: self._recorded.renew(db, found),
        )

    def _request(
        self, tenant: Tenant, run: Run, seq: int, kind: Kind, body: bytes, content_type: str
    ) -> Request:
        return Request(
            id=request_id(run.id, seq),
            kind=kind,
            owner=tenant.id,
            seq=seq,
            run_id=run.id,
            payload=body,
            payload_type=content_type,
            created_at=self._clock(),
        )

    async def _fetch(self, run: RunId) -> Stored | None:
        async def read(db: AsyncSession) -> Stored | None:
            found = await queries.find(db, run)
            if found is None:
                return None
            creation = await journal.find(db, request_id(run, 0))
            error = None if creation is None else creation.error
            return Stored(found, *await journal.progress(db, run), error)

        return await self._ledger.db.read(read)


def adapter_spec(lora: LoraShape) -> AdapterSpec:
    return AdapterSpec(
        rank=lora.rank,
        alpha=lora.alpha,
        seed=lora.seed,
        train_attn=lora.train_attn,
        train_mlp=lora.train_mlp,
        train_unembed=lora.train_unembed,
    )


async def _decode_aside(body: bytes, content_type: str) -> TrainingSubmission:
    """Off the event loop when it is large: heartbeats and polls go on meanwhile."""
    if len(body) < _LARGE_BODY_BYTES:
        return decode_training(body, content_type)
    return await asyncio.to_thread(decode_training, body, content_type)
