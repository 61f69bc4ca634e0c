"""The order of one run's requests: by seq_id, whatever order they arrive in.

The client sends the chunks of one batch last-first, and never sends some numbers at all (a
request that failed before it left). So a missing number is waited for, but not for ever. Pure:
the caller passes the time.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from server.core.requests import Job

LONGEST_GAP_WAITS = 10
"""A client that goes on sending puts a gap off, but not for more than this many waits."""


class RunQueue:
    """Requests of one run that have not run yet."""

    def __init__(self, done_through: int = -1, refused: Iterable[int] = ()) -> None:
        self.done_through = done_through
        """Every seq up to this one is finished, refused, or given up on; or it was put back."""
        self._waiting: dict[int, Job] = {}
        self._arrived: dict[int, float] = {}
        self._refused = {seq for seq in refused if seq > done_through}
        self._last_arrival = 0.0
        self._advance()

    def __len__(self) -> int:
        return len(self._waiting)

    def add(self, job: Job, now: float) -> None:
        """A number that was given up on and comes after all is run as soon as it is here."""
        self._waiting[job.seq] = job
        self._arrived[job.seq] = self._last_arrival = now

    def refuse(self, seq: int) -> None:
        """A number that will never run: nobody should wait for it."""
        if seq > self.done_through:
            self._refused.add(seq)
            self._advance()

    def ready(self, now: float, gap_wait_s: float) -> Iterator[Job]:
        """The jobs that may run next, in order: what is overdue, then consecutive numbers."""
        gap_ends = self.gap_ends_at(gap_wait_s)
        if not self._waiting or (gap_ends is not None and now < gap_ends):
            return
        due = max(min(self._waiting), self.done_through + 1)
        for seq in sorted(self._waiting):
            while due in self._refused:
                due += 1
            if seq > due:
                return
            yield self._waiting[seq]
            due = max(due, seq + 1)

    def gap_ends_at(self, gap_wait_s: float) -> float | None:
        """When a missing number will be given up on, if one is waited for."""
        if not self._waiting or (first := min(self._waiting)) <= self.done_through + 1:
            return None
        longest = self._arrived[first] + LONGEST_GAP_WAITS * gap_wait_s
        return min(self._last_arrival + gap_wait_s, longest)

    def take(self, job: Job) -> None:
        """The job is about to run; the numbers before it will not come any more."""
        del self._waiting[job.seq], self._arrived[job.seq]
        self.done_through = max(self.done_through, job.seq)
        self._advance()

    def put_back(self, job: Job) -> None:
        """The job was taken but did not run: it comes first again."""
        self._waiting[job.seq] = job
        self._arrived[job.seq] = self._last_arrival

    def _advance(self) -> None:
        while self.done_through + 1 in self._refused:
            self.done_through += 1
            self._refused.discard(self.done_through)
