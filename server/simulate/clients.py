"""A simulated client: what it has submitted, what is done, and how long its steps took."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field

from server.core.ids import RequestId, RunId, TenantId
from server.core.requests import Job, Kind, Slice
from server.simulate.workloads import ROUND_TRIP_S, Round, Step, Tenant


@dataclass(slots=True)
class _Flight:
    """A step that was submitted and is not done."""

    submitted: float
    last_seq: int
    """Of its optimizer step."""
    wanted_tokens: int = 0
    """At the server and not in a pass yet."""


@dataclass(slots=True)
class Client:
    """One tenant with one run. Times are virtual seconds."""

    tenant: Tenant
    run: RunId
    rounds: Iterator[Round]
    latencies: list[float] = field(default_factory=list)
    """What the client sees of each step: from its submission, or from the end of the run's step
    before it where it was queued behind that, to its result."""
    _flights: deque[_Flight] = field(default_factory=deque)
    _next_seq: int = 0
    _step_ended: float = 0.0
    _num_at_server: int = 0
    _unserved_since: float = 0.0

    @classmethod
    def of(cls, tenant: Tenant, rounds: Iterator[Round]) -> Client:
        return cls(tenant, RunId(str(tenant.number)), rounds)

    @property
    def wanted_tokens(self) -> int:
        """What a pass could take of this client now: nothing behind an optimizer step."""
        return self._flights[0].wanted_tokens if self._flights else 0

    @property
    def idle(self) -> bool:
        """Whether everything it submitted is done."""
        return not self._flights

    def submit(self, steps: tuple[Step, ...], now: float) -> Iterator[tuple[float, Job]]:
        """The requests of a round, and when each arrives at the server."""
        arrival = now + ROUND_TRIP_S / 2
        for step in steps:
            self._flights.append(_Flight(now, self._next_seq + len(step.batches)))
            for lengths in step.batches:
                yield arrival, self._job(Kind.FORWARD_BACKWARD, lengths)
                arrival += ROUND_TRIP_S
            yield arrival, self._job(Kind.OPTIM_STEP, ())
            arrival += ROUND_TRIP_S

    def _job(self, kind: Kind, lengths: tuple[int, ...]) -> Job:
        seq, self._next_seq = self._next_seq, self._next_seq + 1
        return Job(
            request=RequestId(f"{self.run}:{seq}"),
            run=self.run,
            tenant=TenantId(self.run),
            seq=seq,
            kind=kind,
            lengths=lengths,
        )

    def arrived(self, job: Job, now: float) -> None:
        if not self._num_at_server:
            self._unserved_since = now
        self._num_at_server += 1
        flight = next(flight for flight in self._flights if job.seq <= flight.last_seq)
        flight.wanted_tokens += job.tokens

    def serve(self, taken: Slice, now: float) -> float:
        """A tick takes this; how long the client had work at the server and was given nothing."""
        self._flights[0].wanted_tokens -= taken.tokens
        return now - self._unserved_since

    def served(self, taken: Slice, now: float) -> None:
        self._unserved_since = now
        if not taken.more:
            self._num_at_server -= 1

    def stepped(self, now: float) -> None:
        """That was the optimizer step of its first step."""
        result = now + ROUND_TRIP_S / 2
        flight = self._flights.popleft()
        self.latencies.append(result - max(flight.submitted, self._step_ended))
        self._step_ended = result
