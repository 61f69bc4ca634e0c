"""The order of one run's requests, told as a machine that does everything in any order."""

from __future__ import annotations

import itertools

from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from server.core.requests import Slice
from server.core.sequence import LONGEST_GAP_WAITS, RunQueue
from tests.unit.core.jobs import job

GAP_S = 5.0


def seqs(queue: RunQueue, now: float) -> list[int]:
    return [one.job.seq for one in queue.ready(now, GAP_S)]


def test_consecutive_numbers_are_ready_at_once():
    queue = RunQueue()
    for seq in (0, 1, 2):
        queue.add(job(seq), now=0.0)

    assert seqs(queue, 0.0) == [0, 1, 2]
    assert queue.gap_ends_at(GAP_S) is None


def test_a_missing_number_is_waited_for_from_the_last_arrival_on():
    queue = RunQueue(done_through=0)
    queue.add(job(2), now=0.0)
    queue.add(job(3), now=4.0)

    assert seqs(queue, 8.9) == []
    assert queue.gap_ends_at(GAP_S) == 9.0
    assert seqs(queue, 9.0) == [2, 3]


def test_a_batch_that_arrives_last_first_runs_in_order():
    queue = RunQueue(done_through=0)
    for seq in (3, 4, 2):
        queue.add(job(seq), now=0.0)
    assert seqs(queue, 0.0) == []

    queue.add(job(1), now=1.0)
    assert seqs(queue, 1.0) == [1, 2, 3, 4]


def test_a_client_that_goes_on_sending_cannot_put_a_gap_off_for_ever():
    queue = RunQueue(done_through=0)
    now = 0.0
    for seq in range(2, 200):
        queue.add(job(seq), now)
        if seqs(queue, now):
            break
        now += 0.9 * GAP_S

    assert now <= (LONGEST_GAP_WAITS + 1) * GAP_S


def test_a_refused_number_is_not_waited_for():
    queue = RunQueue(done_through=0)
    queue.add(job(3), now=0.0)
    queue.refuse(2)
    assert seqs(queue, 0.0) == []

    queue.refuse(1)
    assert seqs(queue, 0.0) == [3]
    assert queue.done_through == 2


def test_a_refused_number_in_the_middle_does_not_part_what_is_ready():
    queue = RunQueue(done_through=0)
    for seq in (1, 3):
        queue.add(job(seq), now=0.0)
    queue.refuse(2)

    assert seqs(queue, 0.0) == [1, 3]


def test_a_number_that_was_given_up_on_runs_as_soon_as_it_comes():
    queue = RunQueue(done_through=0)
    queue.add(job(3), now=0.0)
    queue.take(next(queue.ready(GAP_S, GAP_S)))

    queue.add(job(2), now=6.0)
    queue.add(job(4), now=6.0)
    assert seqs(queue, 6.0) == [2, 4]


def test_a_gap_behind_an_overdue_number_is_still_waited_for():
    queue = RunQueue(done_through=10)
    queue.add(job(13), now=0.0)
    queue.add(job(5), now=0.0)

    assert seqs(queue, 0.0) == [5]
    queue.take(job(5).whole)
    assert seqs(queue, 0.0) == []
    assert seqs(queue, GAP_S) == [13]


def test_jobs_that_were_put_back_come_first_again():
    queue = RunQueue(done_through=0)
    for seq in (1, 2, 3):
        queue.add(job(seq), now=0.0)
    taken = list(queue.ready(0.0, GAP_S))[:2]
    for one in taken:
        queue.take(one)
    for one in reversed(taken):
        queue.put_back(one.job)

    assert seqs(queue, 0.0) == [1, 2, 3]


def test_jobs_around_a_refused_number_can_be_put_back():
    queue = RunQueue(done_through=0)
    queue.refuse(2)
    for seq in (1, 3):
        queue.add(job(seq), now=0.0)
    for one in list(queue.ready(0.0, GAP_S)):
        queue.take(one)
        queue.put_back(one.job)

    assert seqs(queue, 0.0) == [1, 3]


LARGE = job(1, lengths=(5, 6, 7))


def begun() -> RunQueue:
    queue = RunQueue(done_through=0)
    for one in (LARGE, job(2)):
        queue.add(one, now=0.0)
    queue.take(Slice(LARGE, 0, 2))
    return queue


def test_a_request_that_has_begun_goes_on_where_it_was_before_all_else():
    queue = begun()
    assert list(queue.ready(0.0, GAP_S)) == [Slice(LARGE, 2, 3), job(2).whole]
    queue.take(Slice(LARGE, 2, 3))
    assert list(queue.ready(0.0, GAP_S)) == [job(2).whole]


def test_a_lower_number_that_comes_late_waits_for_the_end_of_what_has_begun():
    queue = RunQueue(done_through=0)
    large = job(3, lengths=(5, 6, 7))
    queue.add(large, now=0.0)
    queue.take(Slice(large, 0, 1))
    queue.add(job(2), now=1.0)
    assert list(queue.ready(1.0, GAP_S)) == [Slice(large, 1, 3), job(2).whole]


def test_what_is_begun_again_starts_with_its_first_datum():
    for lose in (RunQueue.begin_again, lambda queue: queue.put_back(LARGE)):
        queue = begun()
        lose(queue)
        assert next(queue.ready(0.0, GAP_S)) == LARGE.whole
        assert len(queue) == 2


def test_a_request_that_ended_early_is_over():
    queue = begun()
    queue.drop(LARGE)
    assert list(queue.ready(0.0, GAP_S)) == [job(2).whole]


def test_what_waits_for_a_number_is_held_up_by_it():
    queue = RunQueue(done_through=0)
    queue.add(job(3), now=0.0)
    assert [queue.holds_up(seq) for seq in (1, 2, 4)] == [True, True, False]


def test_after_a_restart_a_refused_number_ahead_lets_nothing_overtake():
    """5 and 6 wait, 7 was refused when the server died: 4 is the last that was done."""
    queue = RunQueue(done_through=4, refused=[7])
    queue.add(job(6), now=0.0)
    assert seqs(queue, 0.0) == []

    queue.add(job(5), now=0.0)
    queue.add(job(8), now=0.0)
    assert seqs(queue, 0.0) == [5, 6, 8]


def test_numbers_refused_at_once_after_the_last_done_are_done_too():
    assert RunQueue(done_through=4, refused=[6, 5, 3]).done_through == 6


def test_refusing_what_is_over_keeps_nothing():
    queue = RunQueue(done_through=10)
    for seq in range(10):
        queue.refuse(seq)
    assert not queue._refused


@given(st.permutations(range(1, 12)), st.sets(st.integers(1, 11), max_size=5))
def test_whatever_order_they_arrive_in_all_run_once_in_order(
    arrivals: list[int], refused: set[int]
):
    """While none is given up on."""
    queue, ran = RunQueue(done_through=0), []
    for seq in arrivals:
        if seq in refused:
            queue.refuse(seq)
        else:
            queue.add(job(seq), now=0.0)
        for one in list(queue.ready(0.0, GAP_S)):
            queue.take(one)
            ran.append(one.job.seq)

    assert ran == [seq for seq in range(1, 12) if seq not in refused]
    assert not len(queue)


class QueueMachine(RuleBasedStateMachine):
    """Numbers come, are refused, taken and put back; time passes. What is ready is always in
    order, each number runs once, and nothing waits for ever."""

    def __init__(self) -> None:
        super().__init__()
        self.queue = RunQueue(done_through=0)
        self.now = 0.0
        self.sent: set[int] = set()
        self.refused: set[int] = set()
        self.waiting: set[int] = set()
        self.running: list[Slice] = []
        self.ran: list[int] = []
        self.begun: Slice | None = None

    @rule(seq=st.integers(1, 30), datums=st.integers(0, 3))
    def arrive(self, seq: int, datums: int) -> None:
        if seq not in self.sent:
            self.sent.add(seq)
            self.waiting.add(seq)
            self.queue.add(job(seq, lengths=(1,) * datums), self.now)

    @rule(seq=st.integers(1, 30))
    def refuse(self, seq: int) -> None:
        if seq not in self.sent:
            self.sent.add(seq)
            self.refused.add(seq)
            self.queue.refuse(seq)

    @rule(seconds=st.sampled_from([0.5, 2.0, GAP_S]))
    def wait(self, seconds: float) -> None:
        self.now += seconds

    @precondition(lambda self: not self.running)
    @rule(most=st.integers(1, 4), datums=st.integers(1, 3))
    def take(self, most: int, datums: int) -> None:
        """Several, of the last of which only some datums."""
        self.running = list(self.queue.ready(self.now, GAP_S))[:most]
        if self.running and self.running[-1].job.lengths:
            last = self.running[-1]
            end = min(last.first + datums, last.last)
            self.running[-1] = Slice(last.job, last.first, end)
        for one in self.running:
            self.queue.take(one)
            if not one.more:
                self.waiting.remove(one.job.seq)

    @precondition(lambda self: self.running)
    @rule(died=st.booleans())
    def end(self, died: bool) -> None:
        for one in self.running:
            if died:
                self.queue.put_back(one.job)
                self.waiting.add(one.job.seq)
            elif not one.more:
                self.ran.append(one.job.seq)
        last = self.running[-1]
        self.begun = Slice(last.job, last.last, len(last.job.lengths))
        if died or not last.more:
            self.begun = None
        self.running = []

    @precondition(lambda self: not self.running)
    @rule()
    def lose_what_has_begun(self) -> None:
        self.queue.begin_again()
        self.begun = None

    @invariant()
    def it_holds_what_waits(self) -> None:
        assert len(self.queue) == len(self.waiting)

    @precondition(lambda self: not self.running)
    @invariant()
    def what_is_ready_waits_and_is_in_order(self) -> None:
        """What has begun first, with what is left of it; then the lowest."""
        ready = list(self.queue.ready(self.now, GAP_S))
        if self.begun is not None:
            assert ready.pop(0) == self.begun
        numbers = [one.job.seq for one in ready]
        begun = set() if self.begun is None else {self.begun.job.seq}
        assert numbers == sorted(numbers)
        assert set(numbers) <= self.waiting - begun
        assert all(one == one.job.whole for one in ready)
        if numbers:
            assert numbers[0] == min(self.waiting - begun)

    @invariant()
    def nothing_runs_twice(self) -> None:
        assert len(self.ran) == len(set(self.ran))

    @invariant()
    def only_what_came_late_runs_after_a_higher_number(self) -> None:
        """Between two ready numbers lies nothing but what was refused, or is over."""
        ready = [seq for seq in seqs(self.queue, self.now) if seq > self.queue.done_through]
        for before, after in itertools.pairwise(ready):
            assert set(range(before + 1, after)) <= self.refused

    def teardown(self) -> None:
        """Whatever had happened, all that waits can be run by waiting long enough."""
        if self.running:
            self.end(died=True)
        for _ in range(40):
            self.now += LONGEST_GAP_WAITS * GAP_S
            self.take(4, 3)
            if self.running:
                self.end(died=False)
        assert not self.waiting


TestQueueMachine = QueueMachine.TestCase
TestQueueMachine.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
