"""The same tenants under every policy, and each of them alone."""

from __future__ import annotations

import contextlib
import gc
import itertools
import math
from collections.abc import Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from server.core.ids import TenantId
from server.simulate.clients import Client
from server.simulate.loop import Measured, Simulation
from server.simulate.machines import Machine
from server.simulate.policies import POLICIES, FairShare, Policy
from server.simulate.workloads import Round, Tenant


@dataclass(frozen=True, slots=True)
class Outcome:
    """What one policy did. Arrays by kind of tenant, an entry a step."""

    measured: Measured
    latencies: Mapping[str, np.ndarray]
    """Seconds."""
    slowdowns: Mapping[str, np.ndarray]
    """The latency over that of the same step with the machine to itself."""


@dataclass(frozen=True, slots=True)
class Study:
    tenants: Sequence[Tenant]
    machine: Machine
    seconds: float
    outcomes: Mapping[str, Outcome]
    """By policy."""
    alone: Mapping[str, np.ndarray]
    """Latencies by kind, each tenant having the machine to itself."""

    @property
    def kinds(self) -> list[str]:
        return list(dict.fromkeys(tenant.kind for tenant in self.tenants))


def study(tenants: Sequence[Tenant], machine: Machine, seconds: float) -> Study:
    with _no_collector():
        return _study(tenants, machine, seconds)


@contextlib.contextmanager
def _no_collector() -> Generator[None]:
    """As `timeit` does it: walking the simulation's own objects would be charged to a policy."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def _study(tenants: Sequence[Tenant], machine: Machine, seconds: float) -> Study:
    ran = {name: simulated(tenants, machine, seconds, name) for name in POLICIES}
    most = [
        max(len(clients[tenant.number].latencies) for clients, _ in ran.values())
        for tenant in tenants
    ]
    alone = [
        alone_latencies(tenant, machine, steps) for tenant, steps in zip(tenants, most, strict=True)
    ]
    outcomes = {
        name: Outcome(measured, _latencies(clients), _slowdowns(clients, alone))
        for name, (clients, measured) in ran.items()
    }
    by_kind = _by_kind(tenants, [np.array(latencies) for latencies in alone])
    return Study(tenants, machine, seconds, outcomes, by_kind)


def simulated(
    tenants: Sequence[Tenant], machine: Machine, seconds: float, policy: str
) -> tuple[list[Client], Measured]:
    """All of them together. `tenants` are numbered from 0 on."""
    clients = [Client.of(tenant, tenant.rounds(machine.sequence_tokens)) for tenant in tenants]
    weights = {TenantId(client.run): client.tenant.weight for client in clients}
    chosen: Policy = POLICIES[policy](machine.token_budget, weights)
    return clients, Simulation(clients, machine, chosen, seconds).run()


def alone_latencies(tenant: Tenant, machine: Machine, num_steps: int) -> list[float]:
    """The first steps of a tenant that has the machine to itself."""
    rounds = _first_rounds(tenant.rounds(machine.sequence_tokens), num_steps)
    client = Client.of(replace(tenant, number=0), rounds)
    Simulation([client], machine, FairShare(machine.token_budget, {}), math.inf).run()
    return client.latencies[:num_steps]


def _first_rounds(rounds: Iterator[Round], num_steps: int) -> Iterator[Round]:
    while num_steps > 0:
        following = next(rounds)
        num_steps -= len(following.steps)
        yield following


def _latencies(clients: Sequence[Client]) -> dict[str, np.ndarray]:
    tenants = [client.tenant for client in clients]
    return _by_kind(tenants, [np.array(client.latencies) for client in clients])


def _slowdowns(
    clients: Sequence[Client], alone: Sequence[Sequence[float]]
) -> dict[str, np.ndarray]:
    ratios = [
        np.array(client.latencies) / np.array(reference[: len(client.latencies)])
        for client, reference in zip(clients, alone, strict=True)
    ]
    return _by_kind([client.tenant for client in clients], ratios)


def _by_kind(tenants: Sequence[Tenant], arrays: Sequence[np.ndarray]) -> dict[str, np.ndarray]:
    """One array a kind, from one array a tenant."""
    pairs = sorted(zip(tenants, arrays, strict=True), key=lambda pair: pair[0].kind)
    return {
        kind: np.concatenate([array for _, array in group])
        for kind, group in itertools.groupby(pairs, key=lambda pair: pair[0].kind)
    }
