"""The coordinator of a group: the ranks are a list of what they were sent, and their answers are
written down beforehand."""

from __future__ import annotations

from collections.abc import Sequence
from queue import SimpleQueue

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from backends.contract import SampleRequest
from backends.workers import coordinator, messages
from backends.workers.coordinator import Coordinator, GroupLostError
from backends.workers.messages import READY_CALL, Broke, Call, Done, Ready, Reply, Saved
from backends.workers.rank_events import Answered, Called, Events, Lost

Event = Called | Answered | Lost
LOADED = [Answered(rank, READY_CALL, Ready()) for rank in (0, 1)]
UNLOAD = messages.Unload("r")
SAVE = messages.Save("r", "folder", "adapter")
REQUEST = SampleRequest(request_id="q", prompt=np.arange(3), num_samples=1, max_tokens=1)


class Ranks:
    def __init__(self) -> None:
        self.sent: list[tuple[int, Call]] = []

    def send(self, call_id: int, call: Call) -> None:
        self.sent.append((call_id, call))

    def end(self) -> None:
        raise AssertionError("whoever started them ends them")


class Group:
    """What happened to two ranks and their service, event by event."""

    def __init__(self, events: Sequence[Event]) -> None:
        self.ranks = Ranks()
        self.replies: list[tuple[int, Reply]] = []
        queue: Events = SimpleQueue()
        for event in events:
            queue.put(event)
        reply = self.replies.append
        self.run = lambda: Coordinator(self.ranks, 2, lambda *it: reply(it)).run(queue)


def stopped(*events: Event) -> Group:
    """After these and a stop."""
    group = Group([*events, Called(99, messages.Stop())])
    group.run()
    return group


def lost(*events: Event) -> str:
    """Why the ranks cannot go on after these."""
    with pytest.raises(GroupLostError) as caught:
        Group(events).run()
    return str(caught.value)


def test_it_is_ready_when_all_ranks_are():
    assert stopped(*LOADED).replies == [(READY_CALL, Ready())]
    with pytest.raises(GroupLostError, match=r"rank 1 ended with code 1 during loading"):
        Group([LOADED[0], Lost(1, "ended with code 1")]).run()


def test_the_leaders_reply_is_the_groups():
    call = Called(1, SAVE)
    group = stopped(*LOADED, call, Answered(1, 1, Done()), Answered(0, 1, Saved(7)))
    assert group.ranks.sent == [(1, SAVE)]
    assert group.replies[1:] == [(1, Saved(7))]


@given(order=st.lists(st.permutations([0, 1]), min_size=1, max_size=5))
def test_calls_run_in_the_order_they_were_made_and_one_at_a_time(order: list[list[int]]):
    events: Events = SimpleQueue()
    under_way: list[int] = []
    sent, replied = [], []

    class Answering(Ranks):
        def send(self, call_id: int, call: Call) -> None:
            assert not under_way
            under_way.append(call_id)
            sent.append(call_id)
            for rank in order[call_id - 1]:
                events.put(Answered(rank, call_id, Done()))

    def reply(call_id: int, reply: Reply) -> None:
        replied.append(call_id)
        if call_id != READY_CALL:
            under_way.remove(call_id)
        if call_id == len(order):
            events.put(Called(99, messages.Stop()))

    for call_id in range(1, len(order) + 1):
        events.put(Called(call_id, UNLOAD))
    for event in LOADED:
        events.put(event)
    Coordinator(Answering(), 2, reply).run(events)
    assert sent == replied[1:] == list(range(1, len(order) + 1))


def test_it_does_not_sample():
    calls = messages.Sample(REQUEST), messages.Cancel("q"), messages.Update("old", "new")
    group = stopped(*LOADED, *(Called(number, call) for number, call in enumerate(calls, 1)))
    assert not group.ranks.sent
    assert [type(reply) for _, reply in group.replies[1:]] == [Broke] * 3


def test_a_call_that_breaks_in_all_ranks_breaks_alone():
    broke = [Answered(rank, 1, Broke(f"in {rank}")) for rank in (1, 0)]
    after = Answered(0, 2, Done()), Answered(1, 2, Done())
    group = stopped(*LOADED, Called(1, UNLOAD), *broke, Called(2, UNLOAD), *after)
    assert group.replies[1:] == [(1, Broke("in 0")), (2, Done())]


@pytest.mark.parametrize("rank", [0, 1])
def test_ranks_that_do_not_agree_are_lost(rank: int):
    answers = [Answered(rank, 1, Broke("no memory")), Answered(1 - rank, 1, Done())]
    why = lost(*LOADED, Called(1, UNLOAD), *answers)
    assert why == f"Unload (rank {rank} broke: no memory) broke in some ranks only"


def test_only_the_leader_knows_whether_a_save_broke():
    answers = Answered(0, 1, Broke("disk full")), Answered(1, 1, Done())
    group = stopped(*LOADED, Called(1, SAVE), *answers)
    assert group.replies[1:] == [(1, Broke("disk full"))]


@pytest.mark.parametrize("call", [UNLOAD, SAVE])
def test_the_others_are_not_waited_for_for_ever(monkeypatch: pytest.MonkeyPatch, call: Call):
    monkeypatch.setattr(coordinator, "_PATIENCE_S", 0.01)
    why = lost(*LOADED, Called(1, call), Answered(1, 1, Broke("no memory")))
    assert "rank 1 broke: no memory" in why
    assert why.endswith("was not answered by all ranks")


def test_a_rank_that_dies_takes_the_others_along():
    assert lost(*LOADED, Lost(1, "ended with code -9")) == "rank 1 ended with code -9"
    broke = Answered(0, 1, Broke("connection reset"))
    assert lost(*LOADED, Called(1, UNLOAD), broke, Lost(1, "ended with code -9")) == (
        "rank 1 ended with code -9 during Unload (rank 0 broke: connection reset)"
    )


def test_a_rank_that_answers_what_was_not_asked_is_out_of_step():
    assert lost(*LOADED, Answered(1, 3, Done())).startswith("rank 1 answered call 3")
    early = Called(1, UNLOAD), Answered(1, 2, Done())
    assert lost(*LOADED, *early).startswith("rank 1 answered call 2")


def test_a_stop_waits_for_the_call_under_way_and_for_no_other():
    calls = Called(1, SAVE), Called(2, UNLOAD), Called(3, messages.Stop())
    group = Group([*LOADED, *calls, Answered(0, 1, Saved(7)), Answered(1, 1, Done())])
    group.run()
    assert group.ranks.sent == [(1, SAVE)]
    assert group.replies[1:] == [(1, Saved(7))]
