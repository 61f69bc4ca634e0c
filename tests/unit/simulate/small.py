"""Tenants and a machine small enough to reckon by hand."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from server.simulate.clients import Client
from server.simulate.machines import Machine
from server.simulate.workloads import Round, Step, Tenant

MACHINE = Machine(
    description="by hand",
    token_budget=100,
    sequence_tokens=10,
    pass_s=1.0,
    token_s=0.01,
    pass_rank_s=0.1,
    step_rank_s=0.25,
)


def replaced(**changes: float) -> Machine:
    return replace(MACHINE, **changes)


def client(number: int, *rounds: Round, rank: int = 1, weight: float = 1.0) -> Client:
    tenant = Tenant(number=number, kind="sft", weight=weight, rank=rank, seed=number)
    return Client.of(tenant, iter(rounds))


def one_step(*lengths: int, pause_s: float = 0.0) -> Round:
    """A round of one forward_backward with these datums and its optimizer step."""
    return Round(pause_s, (Step((lengths,)),))


def flood(batches: Iterable[tuple[int, ...]]) -> Round:
    """Forward_backwards all at once, and one optimizer step at their end."""
    return Round(0.0, (Step(tuple(batches)),))
