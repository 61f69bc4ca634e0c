"""How a pass is journaled that was given inputs of the service's own: its body as it came, and
those inputs behind it. The journal must hold all that a pass computes with, since what they were
read from may be gone by the time the pass is repeated after a crash.

Layout: uint64 length of the body, the body, then float32[N] for each datum in turn.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from struct import Struct

import numpy as np

from backends.contract import ForwardBackward

RECORDED_CONTENT_TYPE = "application/x-hearth-recorded-logprobs"
"""Of the journal alone; a client that sends it is not understood."""
_LENGTH = Struct("<Q")


def join(body: bytes, logprobs: Sequence[np.ndarray]) -> bytes:
    parts = [row.astype("<f4", copy=False).tobytes() for row in logprobs]
    return b"".join((_LENGTH.pack(len(body)), body, *parts))


def body_of(payload: bytes) -> bytes:
    (length,) = _LENGTH.unpack_from(payload)
    return payload[_LENGTH.size : _LENGTH.size + length]


def restored(request: ForwardBackward, payload: bytes) -> ForwardBackward:
    """The request that `body_of` the payload holds, with the inputs behind it."""
    (length,) = _LENGTH.unpack_from(payload)
    flat = np.frombuffer(payload, dtype="<f4", offset=_LENGTH.size + length)
    ends = np.cumsum([len(datum.tokens) for datum in request.data])[:-1]
    return with_logprobs(request, np.split(flat, ends))


def with_logprobs(request: ForwardBackward, logprobs: Sequence[np.ndarray]) -> ForwardBackward:
    """The request with `logprobs` of each datum, float32[N], in place of the client's."""
    data = tuple(
        replace(datum, loss_inputs={**datum.loss_inputs, "logprobs": row.astype(np.float32)})
        for datum, row in zip(request.data, logprobs, strict=True)
    )
    return replace(request, data=data)
