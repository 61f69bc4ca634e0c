"""The event loop: clients, a policy and a machine under a virtual clock."""

from __future__ import annotations

import heapq
import itertools
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from server.core.requests import PASS_KINDS, Job, Kind, Slice
from server.core.schedule import Tick
from server.simulate.clients import Client
from server.simulate.fairness import Shares
from server.simulate.machines import Machine, Residency
from server.simulate.policies import Policy
from server.simulate.workloads import ROUND_TRIP_S, Round


@dataclass(slots=True, kw_only=True)
class Measured:
    """What one simulation showed, in virtual seconds. What is a share of time, tokens or service
    counts until the clients stop; latencies and waits go on until all is done."""

    seconds: float
    """How long clients began rounds."""
    shares: Shares
    service: list[tuple[float, Counter[int]]] = field(default_factory=list)
    """When each tick ended, and the tokens it had of each tenant."""
    busy_s: float = 0.0
    ready_s: float = 0.0
    """While something at the server could run."""
    num_ticks: int = 0
    longest_wait_s: float = 0.0
    """The longest that a tenant with work at the server was given nothing."""
    scheduler_s: float = 0.0
    """Real processor time of the policy."""


@dataclass(frozen=True, slots=True)
class _Pass:
    began: float
    ended: float
    tokens: Counter[int]
    """By number of the tenant."""

    def left(self, when: float) -> float:
        """The share of it that comes after that."""
        return (self.ended - max(when, self.began)) / (self.ended - self.began)


class Simulation:
    """Clients begin no round after `seconds`; what they submitted before is finished, so that no
    latency is cut short."""

    def __init__(
        self, clients: Sequence[Client], machine: Machine, policy: Policy, seconds: float
    ) -> None:
        self._clients = {client.run: client for client in clients}
        self._machine = machine
        self._residency = Residency(machine)
        self._policy = policy
        self._now = 0.0
        self._coming: list[tuple[float, int, Client, Job | Round]] = []
        """Rounds to begin and requests on their way, by time."""
        self._numbers = itertools.count()
        self._num_at_server = 0
        self._wanted = np.zeros(len(clients))
        """Tokens of each client that a pass could take now."""
        self._pass: _Pass | None = None
        """The one that has just ended, until it is accounted."""
        self._measured = Measured(
            seconds=seconds, shares=Shares([client.tenant.weight for client in clients])
        )

    def run(self) -> Measured:
        for client in self._clients.values():
            self._plan_round(client, 0.0)
        while True:
            self._deliver()
            self._account()
            tick = self._choose()
            if tick is not None:
                self._compute(tick)
            elif self._coming:
                self._advance(self._coming[0][0], busy=False)
            else:
                assert not self._num_at_server, "the policy left something undone"
                return self._measured

    def _plan_round(self, client: Client, now: float) -> None:
        following = next(client.rounds, None)
        if following is not None and now + following.pause_s < self._measured.seconds:
            self._plan(now + following.pause_s, client, following)

    def _plan(self, when: float, client: Client, what: Job | Round) -> None:
        heapq.heappush(self._coming, (when, next(self._numbers), client, what))

    def _deliver(self) -> None:
        """Everything that has come by now."""
        while self._coming and self._coming[0][0] <= self._now:
            when, _, client, what = heapq.heappop(self._coming)
            if isinstance(what, Round):
                for arrival, job in client.submit(what.steps, when):
                    self._plan(arrival, client, job)
            else:
                self._arrive(client, what, when)

    def _arrive(self, client: Client, job: Job, when: float) -> None:
        client.arrived(job, when)
        self._num_at_server += 1
        more = self._note_wanted(client)
        if self._pass is not None and more:
            self._measured.shares.join(client.tenant.number, more, self._pass.left(when))
        started = time.thread_time()
        self._policy.add(job, when)
        self._measured.scheduler_s += time.thread_time() - started

    def _note_wanted(self, client: Client) -> int:
        """How much more it is than before."""
        before = int(self._wanted[client.tenant.number])
        self._wanted[client.tenant.number] = client.wanted_tokens
        return client.wanted_tokens - before

    def _account(self) -> None:
        """Here and not earlier, since it takes what came until the pass ended."""
        if self._pass is not None:
            self._measured.shares.end(self._pass.tokens)
            self._pass = None

    def _choose(self) -> Tick | None:
        started = time.thread_time()
        tick = self._policy.take(self._now)
        self._measured.scheduler_s += time.thread_time() - started
        return tick

    def _compute(self, tick: Tick) -> None:
        measured, began = self._measured, self._now
        parts = [(self._clients[taken.job.run], taken) for taken in tick.slices]
        ranks = {client.run: client.tenant.rank for client, _ in parts}
        seconds = self._machine.seconds(tick.kind, tick.tokens, ranks.values())
        measured.shares.begin(self._wanted)
        tokens: Counter[int] = Counter()
        for client, taken in parts:
            tokens[client.tenant.number] += taken.tokens
            waited = client.serve(taken, began)
            measured.longest_wait_s = max(measured.longest_wait_s, waited)
            self._note_wanted(client)
        self._advance(began + self._residency.bring(ranks) + seconds, busy=True)
        measured.num_ticks += 1
        measured.service.append((self._now, tokens))
        if tick.kind in PASS_KINDS and began < measured.seconds:
            self._pass = _Pass(began, self._now, tokens)
        for client, taken in parts:
            self._settle(client, taken)

    def _settle(self, client: Client, taken: Slice) -> None:
        client.served(taken, self._now)
        if taken.more:
            return
        self._num_at_server -= 1
        if taken.job.kind is Kind.OPTIM_STEP:
            client.stepped(self._now)
            self._note_wanted(client)
            if client.idle:
                self._plan_round(client, self._now + ROUND_TRIP_S / 2)

    def _advance(self, until: float, *, busy: bool) -> None:
        counted = max(0.0, min(until, self._measured.seconds) - self._now)
        self._measured.busy_s += counted if busy else 0.0
        self._measured.ready_s += counted if self._num_at_server else 0.0
        self._now = until
