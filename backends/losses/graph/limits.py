"""How much a graph may do. Everything is counted, nothing is timed: a request that was computed
once can be computed again, on a machine that is busier or slower."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

MAX_NODES = 1_000
MAX_INPUTS = 16
MAX_METRICS = 64
MAX_ITEMS = 256
"""Items of one list or tuple, and of all that are in the arguments of one node."""
MAX_ARGUMENT_DEPTH = 8
MAX_TEXT = 256
MAX_DIMS = 16
MAX_NODE_RUNS = 2**19
"""Nodes times datums of one request; a node costs about 10 microseconds, however small."""

MAX_ELEMENTS = 2**21
MAX_BYTES = 24 * 2**20
BYTES_PER_LOGPROB_BYTE = 64
MAX_WORK = 2**28
"""For one datum; a unit is about a nanosecond."""
REQUEST_WORK = 2**32
"""Shared by the datums of a request,"""
WORK_PER_LOGPROB = 2**15
"""and what each has of its own."""
_INT64 = 2**63

_DTYPES = frozenset(
    {
        torch.float64,
        torch.float32,
        torch.float16,
        torch.bfloat16,
        torch.int64,
        torch.int32,
        torch.int16,
        torch.int8,
        torch.uint8,
        torch.bool,
    }
)


class RefusedError(ValueError):
    """What is asked for is not allowed; the message says what and why."""


class Budget:
    """What one datum's loss may still use."""

    def __init__(self, num_logprobs: int, num_data: int) -> None:
        self._elements = max(MAX_ELEMENTS, 4 * num_logprobs)
        self._bytes = MAX_BYTES + BYTES_PER_LOGPROB_BYTE * 4 * num_logprobs
        own = WORK_PER_LOGPROB * num_logprobs
        self._work = min(MAX_WORK, REQUEST_WORK // num_data + own)

    def take(self, elements: int, work: int) -> None:
        """Before something is computed."""
        if elements > self._elements:
            raise RefusedError(f"makes {elements} elements; the limit is {self._elements}")
        if 4 * elements > self._bytes:
            raise RefusedError(f"makes {elements} elements, more than is left to this loss")
        if work > self._work:
            raise RefusedError("needs more computing than is left to this loss")
        self._work -= work

    def admit(self, value: Any) -> None:
        """After something was computed: raises RefusedError for what may not go on."""
        if isinstance(value, Tensor):
            self._admit_tensor(value)
        elif isinstance(value, tuple | list):
            check_length(len(value))
            for item in value:
                if isinstance(item, tuple | list):
                    raise RefusedError("gives lists within lists")
                self.admit(item)
        elif isinstance(value, int) and not -_INT64 <= value < _INT64:
            raise RefusedError("gives an integer beyond 64 bits")
        elif not isinstance(value, int | float | torch.dtype | torch.device):
            raise RefusedError(f"gives a {type(value).__name__}")

    def _admit_tensor(self, tensor: Tensor) -> None:
        if tensor.dtype not in _DTYPES or tensor.layout is not torch.strided:
            raise RefusedError(f"gives a tensor of {tensor.dtype}, {tensor.layout}")
        if tensor.dim() > MAX_DIMS:
            raise RefusedError(f"gives {tensor.dim()} dimensions; the limit is {MAX_DIMS}")
        # A view takes nothing. Its gradient does, while it is added to that of the whole.
        size = 0 if tensor._is_view() else tensor.numel() * tensor.element_size()
        if size > self._bytes:
            raise RefusedError(f"makes {size} bytes; {self._bytes} are left to this loss")
        self._bytes -= size


def check_length(length: int) -> None:
    if length > MAX_ITEMS:
        raise RefusedError(f"has {length} items; the limit is {MAX_ITEMS}")
