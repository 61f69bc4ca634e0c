"""What streamed requests gain from step to step."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from backends.contract import SampleDelta, TopkLogprobs

Topk = tuple[np.ndarray, np.ndarray]


class Progress:
    """Costs nothing for requests that nobody follows."""

    def __init__(self) -> None:
        self._followed: set[str] = set()
        self._gained: dict[str, list[SampleDelta]] = {}

    def follow(self, request_id: str) -> None:
        self._followed.add(request_id)

    def forget(self, request_id: str) -> None:
        """It is over; what it gained last can still be taken."""
        self._followed.discard(request_id)

    def add(
        self, request_id: str, index: int, token: int, logprob: float, topk: Topk | None
    ) -> None:
        if request_id in self._followed:
            delta = SampleDelta(
                index=index,
                tokens=np.array([token], np.int32),
                logprobs=np.array([logprob], np.float32),
                topk=None
                if topk is None
                else TopkLogprobs(token_ids=topk[0][None], logprobs=topk[1][None]),
            )
            self._gained.setdefault(request_id, []).append(delta)

    def take(self) -> Iterator[tuple[str, tuple[SampleDelta, ...]]]:
        """By request, what was gained since the last call."""
        gained, self._gained = self._gained, {}
        for request_id, deltas in gained.items():
            yield request_id, tuple(deltas)

    def clear(self) -> None:
        self._followed.clear()
        self._gained.clear()
