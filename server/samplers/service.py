"""Sampling sessions: what a client samples from, and its requests on their way to an engine."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace

import structlog
from pydantic import Field

from backends.contract import BackendError, Failure, SampleRequest, SampleResult, SamplingEngine
from server.catalogue import Catalogue
from server.checkpoints.service import Checkpoints
from server.core.errors import BadInput, NotFound, QueueFull, ServiceError
from server.core.ids import (
    RequestId,
    SamplingSessionId,
    SessionId,
    TenantId,
    request_id,
    sampling_session_id,
)
from server.core.paths import CheckpointKind, parse_path
from server.core.recent import Recent
from server.core.records import Request, SamplerKind, SamplingSession, Tenant
from server.core.requests import Kind
from server.core.usage import Sampled
from server.runs.registry import Registry
from server.samplers import queries, recorded
from server.samplers.gate import Gate, GatedEngine, TurnedAway
from server.samplers.inflight import InflightWeights
from server.samplers.validation import check_sample_request
from server.store.ledger import Also, Ledger, Outcome
from server.tenancy.sessions import Sessions
from server.wire.json_shapes import WireModel
from server.wire.sample_results import encode_sample_result
from server.wire.sampling import SampleBody, decode_sample, target_layout, to_sample_request

log = structlog.get_logger()

_ATTEMPTS = 3
_CANCELLED = "cancelled by the client"
PROTOBUF = "application/x-protobuf"


class CreateSamplingSession(WireModel):
    session_id: str
    sampling_session_seq_id: int = Field(ge=0, le=2**31 - 1)
    base_model: str | None = None
    model_path: str | None = None


@dataclass(frozen=True, slots=True)
class Accepted:
    """A sample that is journaled."""

    request: RequestId
    num_samples: int


class Samplers:
    def __init__(
        self,
        *,
        ledger: Ledger,
        sessions: Sessions,
        checkpoints: Checkpoints,
        catalogue: Catalogue,
        runs: Registry,
        engines: Mapping[str, SamplingEngine],
        gates: Mapping[str, Gate],
        inflight: InflightWeights,
        max_waiting: int,
        clock: Callable[[], float],
    ) -> None:
        self._ledger = ledger
        self._sessions = sessions
        self._checkpoints = checkpoints
        self._catalogue = catalogue
        self._runs = runs
        self._engines = engines
        self._gates = gates
        self._inflight = inflight
        self._max_waiting = max_waiting
        self._clock = clock
        self._known: Recent[SamplingSessionId, SamplingSession] = Recent()
        self._running: dict[RequestId, asyncio.Task[None]] = {}
        self._adapters: dict[RequestId, str | None] = {}
        self._cancelled: set[RequestId] = set()
        """Of these, what its client does not want any more; gate and engine may not have it yet."""
        self._waiting: Counter[TenantId] = Counter()

    async def create(self, tenant: Tenant, body: CreateSamplingSession) -> SamplingSession:
        """A session on the base model or on a named sampler checkpoint."""
        session = await self._sessions.open(tenant, SessionId(body.session_id))
        sampler = SamplingSession(
            id=sampling_session_id(session.id, body.sampling_session_seq_id),
            session_id=session.id,
            owner=tenant.id,
            base_model=body.base_model or "",
            kind=SamplerKind.BASE,
            created_at=self._clock(),
        )
        if body.model_path is not None:
            sampler = await self._on_checkpoint(tenant, sampler, body.model_path)
        elif body.base_model is None:
            raise BadInput("base_model and model_path are both missing; one is needed")
        self._catalogue.get(sampler.base_model)
        return await self._ledger.db.write(lambda db: queries.add(db, sampler))

    async def get(self, tenant: Tenant, sampler: SamplingSessionId) -> SamplingSession:
        """Raises NotFound for an unknown or foreign id."""
        found = self._known.get(sampler)
        if found is None:
            found = await self._ledger.db.read(lambda db: queries.find(db, sampler))
        if found is None or found.owner != tenant.id:
            raise NotFound(f"sampling session {sampler[:200]!r} does not exist")
        self._known.put(sampler, found)
        return found

    async def join(self, tenant: Tenant, sampler: SamplingSessionId) -> int:
        """A number for one more copy of the client, unique in its sampling session."""
        await self.get(tenant, sampler)
        return await self._ledger.db.write(lambda db: queries.next_clone(db, sampler))

    async def of_session(self, session: SessionId) -> list[SamplingSession]:
        return await self._ledger.db.read(lambda db: queries.of_session(db, session))

    async def submit(self, tenant: Tenant, payload: bytes) -> Accepted:
        """Journal a sample and start it. Raises BadInput, NotFound, Gone, or QueueFull."""
        self._check_room(tenant, 1)
        body = decode_sample(payload)
        if body.sampling_session_id is None or body.seq_id is None:
            raise BadInput("sampling_session_id and seq_id are needed")
        sampler = await self.get(tenant, SamplingSessionId(body.sampling_session_id))
        await self._sessions.open(tenant, sampler.session_id)
        sample = await self._to_engine(sampler, body)
        request = Request(
            id=RequestId(sample.request_id),
            kind=Kind.SAMPLE,
            owner=tenant.id,
            seq=body.seq_id,
            sampling_session_id=sampler.id,
            payload=payload,
            tokens=len(sample.prompt),
            created_at=self._clock(),
        )
        stored, new = await self._ledger.submit(request)
        if new:
            self._start(sampler, stored, body, sample)
        return Accepted(stored.id, body.num_samples)

    async def resume(self, unfinished: list[Request]) -> None:
        """After a restart: generate again what the last process had accepted."""
        for request in unfinished:
            if request.sampling_session_id is None or request.payload is None:
                continue
            sampler = await self._ledger.db.read(
                lambda db, id_=request.sampling_session_id: queries.find(db, id_)
            )
            assert sampler is not None
            if sampler.base_model not in self._catalogue:
                log.warning("sample_left_waiting", request=request.id, model=sampler.base_model)
                continue
            try:
                body = decode_sample(request.payload)
                sample = await self._to_engine(sampler, body)
            except ServiceError as error:
                # Accepted under other rules, or its weights were deleted.
                outcome = Outcome(error=str(error), error_category=error.category)
                await self._ledger.finish(request, outcome)
                continue
            self._start(sampler, request, body, sample)

    @contextmanager
    def unjournaled(
        self, tenant: Tenant, base_model: str, samples: Sequence[SampleRequest]
    ) -> Generator[GatedEngine]:
        """What others may run the samples on, which count as waiting meanwhile, and their adapters
        as in use. Raises QueueFull."""
        self._check_room(tenant, len(samples))
        self._waiting[tenant.id] += len(samples)
        self._adapters.update({RequestId(one.request_id): one.adapter for one in samples})
        try:
            yield GatedEngine(self._engines[base_model], self._gates[base_model], tenant.id)
        finally:
            self._waiting[tenant.id] -= len(samples)
            for one in samples:
                del self._adapters[RequestId(one.request_id)]

    def _check_room(self, tenant: Tenant, more: int) -> None:
        """Raises QueueFull when the tenant may not have that many more samples waiting."""
        if self._waiting[tenant.id] + more > self._max_waiting:
            raise QueueFull(f"{self._max_waiting} samples are waiting already; come back shortly")

    def adapters_in_use(self) -> set[str]:
        """Folders, by path, that a sample under way reads or will read."""
        named = {adapter for adapter in self._adapters.values() if adapter is not None}
        return named | self._inflight.in_use()

    def base_model_of(self, request: Request) -> str | None:
        """What a sample that waits is to be generated by; None when that is not at hand."""
        sampler = request.sampling_session_id and self._known.get(request.sampling_session_id)
        return sampler.base_model if sampler else None

    async def cancel(self, tenant: Tenant, request: RequestId) -> None:
        """Stop generating; a request that is over, or no sample, is left alone."""
        found = await self._ledger.retrieve(request, tenant.id, hold_s=0)
        if request in self._running and found.sampling_session_id is not None:
            sampler = await self.get(tenant, found.sampling_session_id)
            self._cancelled.add(request)
            self._gates[sampler.base_model].turn_away(request)
            # An engine that has just died has stopped generating, too.
            with suppress(BackendError):
                await self._engines[sampler.base_model].cancel(request)

    async def drain(self) -> None:
        """Let what is generating stop; the next start does it again."""
        tasks = list(self._running.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self._inflight.stop()

    async def _on_checkpoint(
        self, tenant: Tenant, sampler: SamplingSession, model_path: str
    ) -> SamplingSession:
        path = parse_path(model_path)
        if path.kind is not CheckpointKind.SAMPLER:
            raise BadInput(
                f"model_path {model_path!r} is a {path.kind} checkpoint; sampling needs a "
                f"{CheckpointKind.SAMPLER} checkpoint, as save_weights_for_sampler makes it"
            )
        checkpoint = await self._checkpoints.readable(tenant.id, path)
        if sampler.base_model not in ("", checkpoint.base_model):
            raise BadInput(
                f"base_model is {sampler.base_model[:100]!r}; the checkpoint was trained on "
                f"{checkpoint.base_model!r}"
            )
        most = self._catalogue.get(checkpoint.base_model).info.max_lora_rank
        if most is not None and checkpoint.lora.rank > most:
            raise BadInput(
                f"model_path {model_path!r} is of rank {checkpoint.lora.rank}; what samples here "
                f"takes {most} at most"
            )
        return replace(
            sampler,
            kind=SamplerKind.CHECKPOINT,
            base_model=checkpoint.base_model,
            model_path=model_path,
            run_id=checkpoint.run_id,
            folder=checkpoint.folder,
        )

    async def _to_engine(self, sampler: SamplingSession, body: SampleBody) -> SampleRequest:
        assert body.seq_id is not None
        info = self._catalogue.get(sampler.base_model).info
        folder = await self._folder(sampler)
        sample = to_sample_request(
            body,
            request_id=request_id(sampler.id, body.seq_id),
            adapter=None if folder is None else self._checkpoints.storage.path(folder),
            session=sampler.id,
            cache_namespace=sampler.id if sampler.kind is SamplerKind.INFLIGHT else "",
            info=info,
        )
        check_sample_request(sample, info)
        return sample

    async def drop_abandoned(self, silent_since: float) -> None:
        """Give back the weights of unnamed samplers whose clients will not come back."""
        db = self._ledger.db
        for sampler in await db.read(lambda s: queries.abandoned(s, silent_since)):
            await db.write(lambda s, id_=sampler.id: queries.drop_folder(s, id_))
            self._known.put(sampler.id, replace(sampler, folder=None))
            self._checkpoints.retire(sampler.folder)

    async def _folder(self, sampler: SamplingSession) -> str | None:
        """The adapter to sample from now: for an inflight session its run's newest."""
        if sampler.kind is SamplerKind.BASE:
            return None
        folder = sampler.folder
        if sampler.kind is SamplerKind.INFLIGHT:
            assert sampler.run_id is not None
            folder = (await self._runs.get(sampler.run_id, None)).run.inflight_folder
        if folder is None or not self._checkpoints.storage.exists(folder):
            what = sampler.model_path or f"sampling session {sampler.id}"
            raise NotFound(f"the weights of {what} have been deleted")
        return folder

    def _start(
        self, sampler: SamplingSession, request: Request, body: SampleBody, sample: SampleRequest
    ) -> None:
        self._known.put(sampler.id, sampler)
        self._waiting[request.owner] += 1
        task = asyncio.create_task(self._run(sampler, request, body, sample))
        self._running[request.id] = task
        self._adapters[request.id] = sample.adapter
        task.add_done_callback(lambda _: self._ended(request))

    def _ended(self, request: Request) -> None:
        self._waiting[request.owner] -= 1
        self._cancelled.discard(request.id)
        del self._running[request.id], self._adapters[request.id]

    async def _run(
        self, sampler: SamplingSession, request: Request, body: SampleBody, sample: SampleRequest
    ) -> None:
        """The supervision loop of one sample: whatever it raises fails it alone."""
        remember: Also | None = None
        try:
            gate = self._gates[sampler.base_model]
            self._check_wanted(sample)
            async with gate.turn(request.owner, sample) as turn:
                result = await self._generate(sampler, sample)
                turn.ended(result)
            outcome = _outcome(body, sample, result)
            if body.record_stability_info and isinstance(result, SampleResult):
                remember = self._remembering(sampler, request, sample, result)
        except TurnedAway:
            outcome = Outcome(error=_CANCELLED, error_category="user")
        except Exception as error:
            log.exception("sample_failed", request=request.id)
            why = f"sampling failed: {type(error).__name__}: {error}"
            outcome = Outcome(error=why, error_category="server")
        await self._ledger.finish(request, outcome, remember)

    def _remembering(
        self, sampler: SamplingSession, request: Request, sample: SampleRequest, done: SampleResult
    ) -> Also:
        """Has a sample's sequences written down with its result, to be trained on by name."""
        sequences = recorded.describe(sampler, request, len(sample.prompt), done, now=self._clock())
        return lambda db: recorded.add(db, sequences)

    async def _generate(
        self, sampler: SamplingSession, sample: SampleRequest
    ) -> SampleResult | Failure:
        """A sample survives the loss of its engine: it is asked again of the next one."""
        last = ""
        for attempt in range(1, _ATTEMPTS + 1):
            self._ledger.mark_started([RequestId(sample.request_id)])
            try:
                return await self._on_its_weights(sampler, sample)
            except BackendError as error:
                log.warning(
                    "sample_lost", request=sample.request_id, attempt=attempt, why=str(error)
                )
                last = str(error)
        return Failure(
            message=f"the sampling engine failed {_ATTEMPTS} times: {last}", category="server"
        )

    async def _on_its_weights(
        self, sampler: SamplingSession, sample: SampleRequest
    ) -> SampleResult | Failure:
        """Raises BackendError."""
        if sampler.kind is not SamplerKind.INFLIGHT:
            return await self._ask(sampler, sample)
        assert sampler.run_id is not None
        return await self._inflight.follow(
            sampler.run_id, lambda adapter: self._ask(sampler, replace(sample, adapter=adapter))
        )

    async def _ask(self, sampler: SamplingSession, sample: SampleRequest) -> SampleResult | Failure:
        """Raises BackendError and TurnedAway."""
        self._check_wanted(sample)
        return await self._engines[sampler.base_model].sample(sample)

    def _check_wanted(self, sample: SampleRequest) -> None:
        """Raises TurnedAway. Whoever calls it waits for nothing before the sample is where a cancel
        finds it."""
        if sample.request_id in self._cancelled:
            raise TurnedAway


def _outcome(body: SampleBody, sample: SampleRequest, done: SampleResult | Failure) -> Outcome:
    match done:
        case SampleResult():
            encoded = encode_sample_result(done, target_layout(body))
            return Outcome(result=encoded, result_type=PROTOBUF, sampled=_cost(sample, done))
        case Failure(message=message, category=category):
            return Outcome(error=message, error_category=category)


def _cost(sample: SampleRequest, result: SampleResult) -> Sampled:
    prompt = len(sample.prompt)
    return Sampled(
        prompt=prompt,
        cached=min(result.prompt_cache_hit_tokens, prompt),
        generated=sum(len(sequence.tokens) for sequence in result.sequences),
    )
