from __future__ import annotations

import numpy as np
import pytest

from backends.contract import SampleDelta
from backends.sampling.vllm.delivered import Delivered
from backends.sampling.vllm.errors import RequestFailed


def delta(index: int, *tokens: int) -> SampleDelta:
    return SampleDelta(
        index=index, tokens=np.array(tokens, np.int32), logprobs=np.zeros(len(tokens), np.float32)
    )


def test_a_repeated_stream_goes_on_where_it_broke_off():
    got: list[tuple[int, list[int]]] = []
    delivered = Delivered(lambda d: got.append((d.index, d.tokens.tolist())))
    delivered.again()
    delivered.add(delta(0, 1, 2, 3))
    delivered.add(delta(1, 7))
    delivered.again()
    for part in (
        delta(0, 1),
        delta(0, 2, 3, 4),
        delta(1, 7),
        delta(1, 8),
        delta(2, 9),
        delta(0, 5),
    ):
        delivered.add(part)
    assert got == [(0, [1, 2, 3]), (1, [7]), (0, [4]), (1, [8]), (2, [9]), (0, [5])]


def test_a_stream_that_goes_on_otherwise_fails():
    delivered = Delivered(lambda _: None)
    delivered.again()
    delivered.add(delta(0, 1, 2, 3))
    delivered.again()
    delivered.add(delta(0, 1))
    with pytest.raises(RequestFailed):
        delivered.add(delta(0, 9))
