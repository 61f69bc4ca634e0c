"""Ranks that each have all of every adapter, and compute some of the datums."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from backends.lora.adapter import Layout
from backends.optimizers.norms import norms
from backends.training.ranks import Part, Value

_BUCKET = 1 << 24
"""Numbers that are summed over the ranks by one call: small gradients travel together."""


class Replicas:
    """What all ranks have of a run is equal to the last bit: it begins so, and each step adds the
    same sums to it."""

    def __init__(self, objects: dist.ProcessGroup) -> None:
        """`objects` is a group of all ranks that takes tensors on the CPU."""
        self._objects = objects

    @property
    def leads(self) -> bool:
        return dist.get_rank() == 0

    def local(self, whole: Layout) -> Layout:
        return whole

    def cut(self, whole: Layout, flat: Tensor) -> Tensor:
        return flat

    def join(self, part: Part) -> Tensor:
        return part.flat

    def add_up(self, parts: Sequence[Part]) -> list[Part]:
        for bucket in _buckets([part.flat for part in parts]):
            _sum_(bucket)
        return list(parts)

    def norms(self, parts: Sequence[Part]) -> list[float]:
        return norms([part.flat for part in parts])

    def exchange(self, value: Value) -> list[Value]:
        values: list[Value | None] = [None] * dist.get_world_size()
        dist.all_gather_object(values, value, group=self._objects)
        return values  # pyrefly: ignore[bad-return]


def _buckets(vectors: Sequence[Tensor]) -> Iterator[list[Tensor]]:
    bucket: list[Tensor] = []
    for vector in vectors:
        bucket.append(vector)
        if sum(one.numel() for one in bucket) >= _BUCKET:
            yield bucket
            bucket = []
    if bucket:
        yield bucket


def _sum_(vectors: list[Tensor]) -> None:
    """Over all ranks, in place."""
    if len(vectors) == 1:
        dist.all_reduce(vectors[0])
        return
    together = torch.cat(vectors)
    dist.all_reduce(together)
    torch._foreach_copy_(vectors, list(together.split([v.numel() for v in vectors])))
