"""Many ranks as one worker: each call goes to all of them, and is over when all have answered."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from queue import Empty

from backends.workers import messages
from backends.workers.messages import READY_CALL, Broke, Call, Reply
from backends.workers.rank_events import Answered, Called, Events, Lost, RankHost

_PATIENCE_S = 10.0
"""How long the other ranks may take once one broke: they may wait for it, and would for ever."""


class GroupLostError(Exception):
    """The ranks cannot go on together; the message says why."""


class Coordinator:
    """For one thread. Calls run in the order they were made, one at a time."""

    def __init__(self, ranks: RankHost, num_ranks: int, send: Callable[[int, Reply], None]) -> None:
        self._ranks = ranks
        self._num_ranks = num_ranks
        self._send = send
        self._waiting: deque[tuple[int, Call]] = deque()
        self._turn: Turn | None = Turn(READY_CALL, "loading", num_ranks)
        self._stopping = False

    def run(self, events: Events) -> None:
        """Work until told to stop. Raises GroupLostError."""
        while self._turn is not None or not self._stopping:
            timeout_s = None if self._turn is None else self._turn.time_left_s()
            try:
                # No name for the event here: it would live on until the next one comes.
                self._take(events.get(timeout=timeout_s))
            except Empty:
                raise GroupLostError(f"{self._turn} was not answered by all ranks") from None
            if self._turn is None and self._waiting and not self._stopping:
                self._begin(*self._waiting.popleft())

    def _take(self, event: Called | Answered | Lost) -> None:
        match event:
            case Called(call_id, call):
                self._accept(call_id, call)
            case Answered(rank, call_id, reply):
                self._hear(rank, call_id, reply)
            case Lost(rank, why):
                during = f" during {self._turn}" if self._turn else ""
                raise GroupLostError(f"rank {rank} {why}{during}")

    def _accept(self, call_id: int, call: Call) -> None:
        match call:
            case messages.Stop():
                self._stopping = True
            case messages.Sample() | messages.Cancel() | messages.Update():
                self._send(call_id, Broke("this worker only trains"))
            case _:
                self._waiting.append((call_id, call))

    def _begin(self, call_id: int, call: Call) -> None:
        leader_decides = isinstance(call, messages.Save)
        self._turn = Turn(call_id, type(call).__name__, self._num_ranks, leader_decides)
        self._ranks.send(call_id, call)

    def _hear(self, rank: int, call_id: int, reply: Reply) -> None:
        turn = self._turn
        if turn is None or turn.call_id != call_id:
            raise GroupLostError(f"rank {rank} answered call {call_id}, which is not under way")
        turn.hear(rank, reply)
        if turn.complete:
            self._turn = None
            self._send(call_id, turn.outcome())


class Turn:
    """One call, from when the ranks get it until all have answered."""

    def __init__(
        self, call_id: int, name: str, num_ranks: int, leader_decides: bool = False
    ) -> None:
        """`leader_decides` where rank 0 alone may break: only it writes files."""
        self.call_id = call_id
        self._name = name
        self._num_ranks = num_ranks
        self._leader_decides = leader_decides
        self._replies: dict[int, Reply] = {}
        self._until: float | None = None
        """Set when a rank broke, on the monotonic clock."""

    def hear(self, rank: int, reply: Reply) -> None:
        self._replies[rank] = reply
        if isinstance(reply, Broke) and self._until is None:
            self._until = time.monotonic() + _PATIENCE_S

    @property
    def complete(self) -> bool:
        return len(self._replies) == self._num_ranks

    def time_left_s(self) -> float | None:
        """None while there is no hurry."""
        return None if self._until is None else max(self._until - time.monotonic(), 0.0)

    def outcome(self) -> Reply:
        """Of a call that is complete. Raises GroupLostError when it broke in some ranks only:
        what they hold is no longer the same."""
        num_broke = sum(isinstance(reply, Broke) for reply in self._replies.values())
        if 0 < num_broke < self._num_ranks and not self._leader_decides:
            raise GroupLostError(f"{self} broke in some ranks only")
        return self._replies[0]

    def __str__(self) -> str:
        """For people, with what is known of the ranks."""
        told = [
            f"rank {rank} broke: {reply.message}"
            for rank, reply in sorted(self._replies.items())
            if isinstance(reply, Broke)
        ]
        return f"{self._name} ({'; '.join(told)})" if told else self._name
