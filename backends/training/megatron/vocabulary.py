"""The vocabulary, divided among tensor-parallel ranks.

Shapes: T tokens.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor


class DividedVocabulary:
    """A `VocabularyShard`."""

    def __init__(self, first: int, group: dist.ProcessGroup) -> None:
        self.first = first
        self._group = group

    def log_sum_exp(self, own: Tensor) -> Tensor:
        gathered = [torch.empty_like(own) for _ in range(self._group.size())]
        dist.all_gather(gathered, own, group=self._group)
        return torch.stack(gathered).logsumexp(dim=0)

    def add_up(self, own: Tensor) -> Tensor:
        dist.all_reduce(own, group=self._group)
        return own
