"""The gate before a sampling engine: so many samples are with it at once, the others wait here.

An engine takes what it is given first come, first served. So no more goes in than keeps it busy,
and who goes next is decided here, by fair share between tenants.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import aclosing, asynccontextmanager

from backends.contract import Failure, SampleDelta, SampleRequest, SampleResult, SamplingEngine
from server.core.admission import Entry, FairQueue
from server.core.ids import TenantId

Part = SampleDelta | SampleResult | Failure


class TurnedAway(Exception):
    """The request was cancelled before its turn, or before the engine had it."""


class Turn:
    """One request's time with the engine. What is not known to have cost less is charged with the
    most that it may have cost: it had its share of the room meanwhile."""

    def __init__(self, request: SampleRequest) -> None:
        self._prompt = len(request.prompt)
        self.tokens = self._prompt + request.num_samples * request.max_tokens

    def ended(self, outcome: SampleResult | Failure) -> None:
        if isinstance(outcome, SampleResult):
            self.generated(sum(len(one.tokens) for one in outcome.sequences))

    def generated(self, tokens: int) -> None:
        self.tokens = self._prompt + tokens


class Gate:
    """Of one base model."""

    def __init__(
        self,
        room: int,
        weights: Mapping[TenantId, float],
        stuck: Callable[[], int] = lambda: 0,
    ) -> None:
        """`room` is how many samples may be with the engine at once, beside those that are `stuck`
        there: frozen by an operator, they would keep the others out."""
        self._stuck = stuck
        self._queue = FairQueue(room, weights)
        self._doors: dict[Entry, asyncio.Future[None]] = {}
        self._waiting: dict[str, Entry] = {}
        """By request id."""
        self._held = False

    def hold(self) -> None:
        """Let nobody in until `let_go`; whoever is in stays."""
        self._held = True

    def let_go(self) -> None:
        self._held = False
        self._let_in()

    def look_again(self) -> None:
        """What is stuck may have changed."""
        self._let_in()

    @asynccontextmanager
    async def turn(self, tenant: TenantId, request: SampleRequest) -> AsyncGenerator[Turn]:
        """Waits until it is the request's turn, which lasts as long as the block. Whoever is
        cancelled leaves the queue. Raises TurnedAway."""
        turn = Turn(request)
        entry = Entry(tenant=tenant, size=request.num_samples, tokens=turn.tokens)
        cost = 0
        try:
            await self._wait(request.request_id, entry)
            try:
                yield turn
            finally:
                cost = turn.tokens
        finally:
            self._queue.leave(entry, cost)
            self._let_in()

    def turn_away(self, request_id: str) -> None:
        """End the wait of a request; one that is in, or unknown, is left alone."""
        entry = self._waiting.get(request_id)
        if entry is not None and not self._doors[entry].done():
            self._doors[entry].set_exception(TurnedAway)

    async def _wait(self, request_id: str, entry: Entry) -> None:
        door = self._doors[entry] = asyncio.get_running_loop().create_future()
        self._waiting[request_id] = entry
        self._queue.join(entry)
        self._let_in()
        try:
            await door
        finally:
            del self._doors[entry], self._waiting[request_id]

    def _let_in(self) -> None:
        if self._held:
            return
        for entry in self._queue.admit(self._stuck()):
            # Whoever has been cancelled, and not noticed yet, leaves as soon as it does.
            if not self._doors[entry].done():
                self._doors[entry].set_result(None)


class GatedEngine:
    """An engine as one tenant has it: in turn with the others."""

    def __init__(self, engine: SamplingEngine, gate: Gate, tenant: TenantId) -> None:
        self._engine = engine
        self._gate = gate
        self._tenant = tenant

    async def sample(self, request: SampleRequest) -> SampleResult | Failure:
        async with self._gate.turn(self._tenant, request) as turn:
            outcome = await self._engine.sample(request)
            turn.ended(outcome)
            return outcome

    async def stream(self, request: SampleRequest) -> AsyncGenerator[Part]:
        generated = 0
        async with (
            self._gate.turn(self._tenant, request) as turn,
            aclosing(self._engine.stream(request)) as parts,
        ):
            async for part in parts:
                if isinstance(part, SampleDelta):
                    generated += len(part.tokens)
                    turn.generated(generated)
                else:
                    turn.ended(part)
                yield part
