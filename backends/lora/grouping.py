"""Which adapters' low-rank products are made by one call.

A call costs some microseconds whatever its size, and a layer makes six of them for an adapter,
there and back: for a thousand adapters with a few tokens each that is most of the time.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby

import torch

from backends.lora.adapter import Layout
from backends.lora.groups import EqualGroup, RaggedGroup, grouped_mm_takes
from backends.lora.linear import Segment
from backends.lora.parts import Owner, Part

MAX_MODULE = 2**13
"""R * (I + O) of a module, on average: larger ones take longer to copy than calls take."""
MAX_WORK = 2**20
"""That times the rows of an adapter: more of it takes so long that the calls do not count. Both are
measured (backends/README.md)."""


def arranged(owners: Sequence[Owner], dtype: torch.dtype) -> list[Part]:
    """The parts of a packed row, in its order, for a model of `dtype`. Only neighbours come
    together: sort by `likeness` where the order is free."""
    parts: list[Part] = []
    for kind, neighbours in groupby(owners, lambda owner: _kind(owner, dtype)):
        layout, length = kind[0], kind[-1]
        members = list(neighbours)
        if length is None and len(members) > 1:
            parts.append(RaggedGroup.of(members, dtype))
        elif length is not None and worth_stacking(len(members), length, layout):
            parts.append(EqualGroup.of(members, dtype))
        else:
            parts.extend(Segment.of(owner, dtype) for owner in members)
    return parts


def worth_stacking(num_adapters: int, length: int, layout: Layout) -> bool:
    """Whether adapters with `length` rows each gain more by fewer calls than it costs to copy
    their weights side by side."""
    if num_adapters == 1 or not layout.modules:
        return False
    module = layout.num_elements // len(layout.modules)
    return module <= MAX_MODULE and length * module <= MAX_WORK


def likeness(layout: Layout, scale: float, length: int) -> tuple[float, ...]:
    """A key to sort adapters by, so that those are neighbours that can be a group."""
    return layout.rank, layout.num_elements, scale, length


def _kind(owner: Owner, dtype: torch.dtype) -> tuple[Layout, float, bool, bool, int | None]:
    """What must be equal in a group; the length does not matter to a ragged one, but for owners
    without a row, which are not in a group with others."""
    adapter, empty = owner.adapter, owner.start == owner.end
    ragged = adapter.flat.device.type == "cuda" and grouped_mm_takes(adapter.layout, dtype)
    length = None if ragged else owner.end - owner.start
    return adapter.layout, adapter.scale, owner.backward, empty, length
