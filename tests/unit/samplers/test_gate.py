"""Waiting for one's turn, giving up, and being turned away."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest

from backends.contract import SampledSequence, SampleRequest, SampleResult
from server.core.ids import TenantId
from server.samplers.gate import Gate, Turn, TurnedAway

A, B = TenantId("a"), TenantId("b")


def request(name: str, max_tokens: int = 8, num_samples: int = 1) -> SampleRequest:
    return SampleRequest(
        request_id=name,
        prompt=np.arange(4),
        num_samples=num_samples,
        max_tokens=max_tokens,
    )


class Visitors:
    """Tasks that stay in the gate until they are let out."""

    def __init__(self, gate: Gate) -> None:
        self.gate = gate
        self.entered: list[str] = []
        self._exits: dict[str, asyncio.Event] = {}

    def send(self, tenant: TenantId, name: str) -> asyncio.Task[None]:
        self._exits[name] = asyncio.Event()
        return asyncio.create_task(self._visit(tenant, name))

    def let_out(self, name: str) -> None:
        self._exits[name].set()

    async def _visit(self, tenant: TenantId, name: str) -> None:
        async with self.gate.turn(tenant, request(name)):
            self.entered.append(name)
            await self._exits[name].wait()


async def settle() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


async def test_only_so_many_are_in_and_the_next_is_another_tenants():
    visitors = Visitors(Gate(2, {}))
    tasks = [visitors.send(A, f"a{i}") for i in range(5)] + [visitors.send(B, "b")]
    await settle()
    assert visitors.entered == ["a0", "a1"]
    for name in ["a0", "b", "a1", "a2", "a3", "a4"]:
        visitors.let_out(name)
        await settle()
    await asyncio.gather(*tasks)
    assert visitors.entered == ["a0", "a1", "b", "a2", "a3", "a4"]


async def test_what_is_stuck_inside_keeps_nobody_out():
    stuck = 0
    gate = Gate(1, {}, lambda: stuck)
    visitors = Visitors(gate)
    tasks = [visitors.send(A, "frozen"), visitors.send(A, "a1"), visitors.send(A, "a2")]
    await settle()
    assert visitors.entered == ["frozen"]
    stuck = 1
    gate.look_again()
    await settle()
    assert visitors.entered == ["frozen", "a1"]
    stuck = 0
    visitors.let_out("a1")
    await settle()
    assert visitors.entered == ["frozen", "a1"], "it moves again, and counts"
    visitors.let_out("frozen")
    visitors.let_out("a2")
    await asyncio.gather(*tasks)


@pytest.mark.parametrize("victim", ["a0", "a1"])
async def test_who_is_cancelled_inside_or_outside_makes_room_for_the_next(victim: str):
    visitors = Visitors(Gate(1, {}))
    tasks = {name: visitors.send(A, name) for name in ("a0", "a1", "a2")}
    await settle()
    tasks[victim].cancel()
    visitors.let_out("a0")
    visitors.let_out("a1")
    visitors.let_out("a2")
    done = await asyncio.gather(*tasks.values(), return_exceptions=True)
    assert [isinstance(one, asyncio.CancelledError) for one in done].count(True) == 1
    assert visitors.entered[-1] == "a2"


async def test_who_is_cancelled_at_the_moment_it_is_let_in_takes_no_room_with_it():
    visitors = Visitors(Gate(1, {}))
    async with visitors.gate.turn(A, request("a0")):
        second, third = visitors.send(A, "a1"), visitors.send(A, "a2")
        await settle()
    second.cancel()  # let in by the first one's leaving, and not run since
    visitors.let_out("a2")
    await third
    with pytest.raises(asyncio.CancelledError):
        await second
    assert visitors.entered == ["a2"]


async def test_only_who_waits_is_turned_away():
    gate = Gate(1, {})
    visitors = Visitors(gate)
    inside, waiting = visitors.send(A, "a0"), visitors.send(A, "a1")
    await settle()
    for name in ("a0", "a1", "a1", "unknown"):
        gate.turn_away(name)
    with pytest.raises(TurnedAway):
        await waiting
    visitors.let_out("a0")
    await inside
    assert visitors.entered == ["a0"]


def test_a_turn_costs_the_most_until_it_is_known_what_was_generated():
    turn = Turn(request("r", max_tokens=8, num_samples=3))
    assert turn.tokens == 4 + 3 * 8
    sequence = SampledSequence(
        tokens=np.zeros(2, np.int32), logprobs=np.zeros(2, np.float32), stop_reason="stop"
    )
    turn.ended(SampleResult(sequences=(sequence,) * 3))
    assert turn.tokens == 4 + 3 * 2
