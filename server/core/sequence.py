"""The order of one run's requests: by seq_id, whatever order they arrive in.

The client sends the chunks of one batch last-first, and never sends some numbers at all (a
request that failed before it left). So a missing number is waited for, but not for ever. Pure:
the caller passes the time.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterable, Iterator

from server.core.requests import Job, Slice

LONGEST_GAP_WAITS = 10
"""A client that goes on sending puts a gap off, but not for more than this many waits."""


class RunQueue:
    """Requests of one run that have not run yet, and how far the one that has begun has come."""

    def __init__(self, done_through: int = -1, refused: Iterable[int] = ()) -> None:
        self.done_through = done_through
        """Every seq up to this one is finished, refused, or given up on; or it has begun, or was
        put back."""
        self._order: list[int] = []
        """Of what waits, the lowest first."""
        self._left: dict[int, Slice] = {}
        """What is left of each: all of it, but of the one that has begun."""
        self._arrived: dict[int, float] = {}
        self._begun: int | None = None
        """The request that has run in part: nothing else runs before its end."""
        self._refused = {seq for seq in refused if seq > done_through}
        self._last_arrival = 0.0
        self._advance()

    def __len__(self) -> int:
        return len(self._order)

    @property
    def begun(self) -> bool:
        """Whether a request has run in part."""
        return self._begun is not None

    def add(self, job: Job, now: float) -> None:
        """A number that was given up on and comes after all is run as soon as it is here."""
        self._last_arrival = now
        self._put(job)

    def refuse(self, seq: int) -> None:
        """A number that will never run: nobody should wait for it."""
        if seq > self.done_through:
            self._refused.add(seq)
            self._advance()

    def holds_up(self, seq: int) -> bool:
        """Whether what waits here waits for this number."""
        return bool(self._order) and seq < self._order[-1]

    def ready(self, now: float, gap_wait_s: float) -> Iterator[Slice]:
        """What is left of the jobs that may run next, in order: of the one that has begun, of
        what is overdue, then of consecutive numbers."""
        if self._begun is not None:
            yield self._left[self._begun]
        gap_ends = self.gap_ends_at(gap_wait_s)
        if not self._order or (gap_ends is not None and now < gap_ends):
            return
        due = max(self._order[0], self.done_through + 1)
        for seq in self._order:
            if seq == self._begun:
                continue
            while due in self._refused:
                due += 1
            if seq > due:
                return
            yield self._left[seq]
            due = max(due, seq + 1)

    def gap_ends_at(self, gap_wait_s: float) -> float | None:
        """When a missing number will be given up on, if one is waited for."""
        if not self._order or (first := self._order[0]) <= self.done_through + 1:
            return None
        longest = self._arrived[first] + LONGEST_GAP_WAITS * gap_wait_s
        return min(self._last_arrival + gap_wait_s, longest)

    def take(self, taken: Slice) -> None:
        """The slice is about to run; the numbers before it will not come any more. A job that
        goes on after it stays, as the first."""
        job = taken.job
        if not taken.more:
            self.drop(job)
            return
        self._begun = job.seq
        self._left[job.seq] = Slice(job, taken.last, len(job.lengths))
        self._pass(job.seq)

    def drop(self, job: Job) -> None:
        """Nothing more of the job will run."""
        if self._begun == job.seq:
            self._begun = None
        if self._left.pop(job.seq, None) is not None:
            del self._arrived[job.seq]
            del self._order[bisect_left(self._order, job.seq)]
        self._pass(job.seq)

    def put_back(self, job: Job) -> None:
        """The job was taken, in part or whole, and what ran of it is lost: it comes first again."""
        self.begin_again()
        if job.seq not in self._left:
            self._put(job)

    def begin_again(self) -> None:
        """What ran of the request that has begun is lost: it starts with its first datum."""
        if self._begun is not None:
            self._left[self._begun] = self._left[self._begun].job.whole
            self._begun = None

    def _put(self, job: Job) -> None:
        insort(self._order, job.seq)
        self._left[job.seq] = job.whole
        self._arrived[job.seq] = self._last_arrival

    def _pass(self, seq: int) -> None:
        self.done_through = max(self.done_through, seq)
        self._advance()

    def _advance(self) -> None:
        while self.done_through + 1 in self._refused:
            self.done_through += 1
            self._refused.discard(self.done_through)
