"""The deltas of one streamed sample on their way to a reader who may be slow."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import numpy as np

from backends.contract import SampleDelta, TopkLogprobs

_PIECES = 64
"""More small deltas of a sample than this are joined: they take more room than what they hold."""


class Backlog:
    """Holds no more than the result itself would, however long nobody reads."""

    def __init__(self) -> None:
        self._deltas: dict[int, list[SampleDelta]] = {}
        self._news = asyncio.Event()

    def add(self, deltas: Sequence[SampleDelta]) -> None:
        for delta in deltas:
            held = self._deltas.setdefault(delta.index, [])
            held.append(delta)
            if len(held) > _PIECES:
                held[:] = [joined(held)]
        self._news.set()

    def wake(self) -> None:
        """Nothing more will come."""
        self._news.set()

    async def wait(self) -> None:
        """Returns when there is something to take, or nothing more will come."""
        await self._news.wait()

    def take(self) -> list[SampleDelta]:
        """One delta for each sample that has gained anything."""
        held, self._deltas = self._deltas, {}
        self._news.clear()
        return [joined(deltas) for _, deltas in sorted(held.items())]


def joined(deltas: Sequence[SampleDelta]) -> SampleDelta:
    """Consecutive deltas of one sample as one."""
    if len(deltas) == 1:
        return deltas[0]
    topk = [delta.topk for delta in deltas if delta.topk is not None]
    return SampleDelta(
        index=deltas[0].index,
        tokens=np.concatenate([delta.tokens for delta in deltas]),
        logprobs=np.concatenate([delta.logprobs for delta in deltas]),
        topk=TopkLogprobs(
            token_ids=np.concatenate([one.token_ids for one in topk]),
            logprobs=np.concatenate([one.logprobs for one in topk]),
        )
        if topk
        else None,
    )
