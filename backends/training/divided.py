"""Ranks that have the adapters between them: each all of them, or parts that are cut as the base
model is."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from backends.lora.adapter import Layout
from backends.optimizers.norms import norms
from backends.training.ranks import Part
from backends.training.shares import Share, Shares

Value = TypeVar("Value")

_BUCKET = 16 << 20
"""Numbers that are copied together and summed up by one call: many small ones would each wait for
the network."""


class DividedRanks:
    """`Ranks` of the default process group. Every rank makes one at the same time."""

    def __init__(self, own: Mapping[str, Share]) -> None:
        """`own` is what this rank has of the base model's targets."""
        self._host = _new_group(range(dist.get_world_size()), "gloo")
        self._rank = dist.get_rank()
        self._shares = Shares(self.exchange(dict(own)), self._rank)
        self._groups = {
            holders: _new_group(holders) for holders in self._shares.holders if len(holders) > 1
        }

    @property
    def leads(self) -> bool:
        return self._rank == 0

    def local(self, whole: Layout) -> Layout:
        return self._shares.local(whole, self._rank)

    def cut(self, whole: Layout, flat: Tensor) -> Tensor:
        return self._shares.cut(whole, flat)

    def join(self, part: Part) -> Tensor | None:
        """On the CPU."""
        if not self.leads:
            if self._rank in self._shares.senders:
                dist.send(part.flat.cpu(), 0, group=self._host)
            return None
        parts = {0: part.flat.cpu()}
        for rank in self._shares.senders:
            if rank != 0:
                parts[rank] = torch.empty(self._shares.local(part.whole, rank).num_elements)
                dist.recv(parts[rank], rank, group=self._host)
        return self._shares.join(part.whole, parts)

    def add_up(self, parts: Sequence[Part]) -> list[Part]:
        """What several ranks have is summed over these: they saw other tokens, or other inputs or
        outputs of the layer."""
        for holders, group in self._groups.items():
            if self._rank in holders:
                for bucket in _buckets(self._views(parts, holders)):
                    _all_reduce(bucket, group)
        return list(parts)

    def _views(self, parts: Sequence[Part], holders: tuple[int, ...]) -> Iterator[Tensor]:
        for part in parts:
            for cut in self._shares.cuts(part.whole):
                if cut.holders == holders:
                    yield part.flat[cut.start : cut.end]

    def norms(self, parts: Sequence[Part]) -> list[float]:
        """What several ranks have counts on the first of them."""
        own = [
            [
                part.flat[cut.start : cut.end]
                for cut in self._shares.cuts(part.whole)
                if cut.holders[0] == self._rank
            ]
            for part in parts
        ]
        found = iter(norms([view for views in own for view in views]))
        squares = [sum(next(found) ** 2 for _ in views) for views in own]
        totals = torch.tensor(squares, dtype=torch.float64)
        dist.all_reduce(totals, group=self._host)
        return [math.sqrt(total) for total in totals.tolist()]

    def exchange(self, value: Value) -> list[Value]:
        values: list[Value] = [value] * dist.get_world_size()
        dist.all_gather_object(values, value, group=self._host)
        return values


def _new_group(ranks: Sequence[int], backend: str | None = None) -> dist.ProcessGroup:
    """Every rank makes it; only members may use it."""
    group = dist.new_group(list(ranks), backend=backend)
    assert isinstance(group, dist.ProcessGroup) or dist.get_rank() not in ranks
    return group  # pyrefly: ignore[bad-return]


def _buckets(views: Iterator[Tensor]) -> Iterator[list[Tensor]]:
    """Neighbours of together at most `_BUCKET` numbers, unless one has more."""
    bucket: list[Tensor] = []
    size = 0
    for view in views:
        if bucket and size + view.numel() > _BUCKET:
            yield bucket
            bucket, size = [], 0
        bucket.append(view)
        size += view.numel()
    if bucket:
        yield bucket


def _all_reduce(views: Sequence[Tensor], group: dist.ProcessGroup) -> None:
    if len(views) == 1:
        dist.all_reduce(views[0], group=group)
        return
    together = torch.cat(list(views))
    dist.all_reduce(together, group=group)
    torch._foreach_copy_(list(views), together.split([view.numel() for view in views]))
