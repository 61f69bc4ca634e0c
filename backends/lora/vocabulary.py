"""A vocabulary that one process has, or several share.

Shapes: T tokens, K targets a token.
"""

from __future__ import annotations

from typing import Protocol

from torch import Tensor


class VocabularyShard(Protocol):
    """The part of the vocabulary that one process has, where several share it."""

    @property
    def first(self) -> int:
        """The id of its first token; the weight's rows are those from there on."""
        ...

    def log_sum_exp(self, own: Tensor) -> Tensor:
        """Of all processes' log-sum-exps [T, 1]."""
        ...

    def add_up(self, own: Tensor) -> Tensor:
        """The sum of all processes' tensors."""
        ...


class WholeVocabulary:
    """One process that has all of it."""

    first = 0

    def log_sum_exp(self, own: Tensor) -> Tensor:
        return own

    def add_up(self, own: Tensor) -> Tensor:
        return own


def own_targets(targets: Tensor, first: int, num_tokens: int) -> tuple[Tensor, Tensor]:
    """Targets as rows of a weight of `num_tokens` rows from token `first` on, and which of them
    have one; the others are any."""
    own = targets - first
    here = (own >= 0) & (own < num_tokens)
    return own.masked_fill_(~here, 0), here
