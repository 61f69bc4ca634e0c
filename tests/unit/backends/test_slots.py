"""Which runs lie on an accelerator; the runs here only note where they were sent."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from backends.training.slots import Slots

HOST, DEVICE = torch.device("cpu"), torch.device("cuda", 0)


class Run:
    def __init__(self, num_bytes: int, device: torch.device = DEVICE) -> None:
        self.num_bytes = num_bytes
        self.device = device

    def move(self, device: torch.device) -> None:
        self.device = device


def _on_device(runs: dict[str, Run]) -> set[str]:
    return {name for name, run in runs.items() if run.device == DEVICE}


def test_the_least_recently_used_leaves_and_comes_back_when_it_is_needed():
    runs = {name: Run(10) for name in "abc"}
    slots = Slots(runs, DEVICE, 30)
    slots.use("a")
    runs["d"] = Run(10)
    slots.use("d")
    assert _on_device(runs) == {"a", "c", "d"}
    slots.use("b")
    assert _on_device(runs) == {"a", "b", "d"}


def test_no_more_leave_than_must():
    runs = {"a": Run(5), "b": Run(20), "c": Run(1), "d": Run(15)}
    Slots(runs, DEVICE, 36).use("d")
    assert _on_device(runs) == {"b", "c", "d"}


def test_what_a_call_needs_is_on_the_device_even_beyond_the_budget():
    runs = {name: Run(10, HOST) for name in "abc"}
    slots = Slots(runs, DEVICE, 15)
    slots.use("ab")
    assert _on_device(runs) == {"a", "b"}
    slots.use("c")
    assert _on_device(runs) == {"c"}


def test_without_a_budget_runs_leave_only_where_memory_ran_out():
    runs = {name: Run(1 << 60) for name in "abc"}
    slots = Slots(runs, DEVICE, None)
    slots.use("c")
    assert _on_device(runs) == {"a", "b", "c"}
    assert slots.make_room("c")
    assert _on_device(runs) == {"c"}
    assert not slots.make_room("c")


def test_on_a_cpu_nothing_moves():
    runs = {name: Run(10, HOST) for name in "ab"}
    slots = Slots(runs, HOST, 5)
    slots.use("a")
    assert list(runs) == ["a", "b"]
    assert not slots.make_room("a")


calls = st.lists(st.sets(st.sampled_from("abcdef"), min_size=1, max_size=3), min_size=1)


@given(calls, st.lists(st.integers(1, 20), min_size=6, max_size=6), st.integers(0, 60))
def test_after_every_call_its_runs_are_there_and_the_others_within_the_budget(calls, sizes, budget):
    runs = dict(zip("abcdef", map(Run, sizes), strict=True))
    slots = Slots(runs, DEVICE, budget)
    last_use = dict.fromkeys("abcdef", -1)
    for time, names in enumerate(calls):
        slots.use(names)
        last_use |= dict.fromkeys(names, time)
        there = _on_device(runs)
        assert names <= there
        used = sum(runs[name].num_bytes for name in there)
        assert there == names or used <= budget
        assert runs.keys() == last_use.keys()
    order = [last_use[name] for name in runs]
    assert order == sorted(order)
