"""Keys and values of tokens already read: a prompt's own, and the padded rows that decode together.

Attention over one sequence at a time costs a kernel call a sequence and layer; over rows of one
tensor it is one call for all of them. On SmolLM2's shape with 16 sequences of 256 tokens on two
shared cores that was 282 us a layer against 617 us. So decoding sequences live in rows of a few
slabs, one for each class of length, and a row moves when it outgrows its class.

Shapes: G key/value heads, P prompt tokens, C capacity of a slab, D head size. Tensors come in
model order: keys of layer 0, values of layer 0, keys of layer 1, ...
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

_FINEST = 64
_COARSEST = 512
_ROWS_AT_ONCE = 4


class PromptKV:
    """Keys and values of one prompt in tensors of its exact length, written front to back."""

    def __init__(self, length: int) -> None:
        self.length = length
        self.tensors: list[Tensor] = []
        """Each [G, P, D]; made by the first pass, which alone knows the heads."""

    def write(self, layer: int, start: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Put k, v [G, n, D] at `start`; returns all of the layer up to there, [G, start+n, D]."""
        if len(self.tensors) == 2 * layer:
            heads, _, size = k.shape
            self.tensors += [k.new_empty(heads, self.length, size) for _ in range(2)]
        keys, values = self.tensors[2 * layer : 2 * layer + 2]
        end = start + k.shape[1]
        keys[:, start:end] = k
        values[:, start:end] = v
        return keys[:, :end], values[:, :end]

    def copy_from(self, tensors: Sequence[Tensor], num_tokens: int) -> None:
        """Start with the first tokens of another sequence's [G, *, D] tensors."""
        for source in tensors:
            mine = source.new_empty(source.shape[0], self.length, source.shape[2])
            mine[:, :num_tokens] = source[:, :num_tokens]
            self.tensors.append(mine)


@dataclass(eq=False, slots=True)
class Row:
    """One decoding sequence's place: row `index` of its slab, the first `length` tokens filled."""

    slab: Slab
    index: int
    length: int

    def views(self) -> list[Tensor]:
        """[G, length, D] each"""
        return [t[self.index, :, : self.length] for t in self.slab.tensors]


@dataclass(eq=False, slots=True)
class Slab:
    """Rows of sequences of similar length. Rows in use are always the first ones, so attention
    reads a slice and gathers nothing."""

    capacity: int
    rows: list[Row] = field(default_factory=list)
    tensors: list[Tensor] = field(default_factory=list)
    """Each [rows, G, C, D]. Zeroed when made: what a mask hides must still be finite."""

    def add(self, source: Sequence[Tensor], length: int) -> Row:
        """A new row holding the first `length` tokens of [G, *, D] tensors."""
        row = Row(self, len(self.rows), length)
        if not self.tensors or row.index == self.tensors[0].shape[0]:
            self._resize(row.index + _ROWS_AT_ONCE, source)
        for mine, other in zip(self.tensors, source, strict=True):
            mine[row.index, :, :length] = other[:, :length]
        self.rows.append(row)
        return row

    def remove(self, row: Row) -> None:
        """The last row moves into the hole."""
        last = self.rows.pop()
        if last is not row:
            for mine, moved in zip(self.tensors, last.views(), strict=True):
                mine[row.index, :, : last.length] = moved
            last.index = row.index
            self.rows[row.index] = last
        if not self.rows:
            self.tensors.clear()
        elif self.tensors[0].shape[0] - len(self.rows) >= 2 * _ROWS_AT_ONCE:
            self._resize(len(self.rows) + _ROWS_AT_ONCE, [t[0] for t in self.tensors])

    def _resize(self, num_rows: int, like: Sequence[Tensor]) -> None:
        """Tensor by tensor, so that only one exists twice at any moment."""
        for i, template in enumerate(like):
            heads, _, size = template.shape
            fresh = template.new_zeros(num_rows, heads, self.capacity, size)
            if i < len(self.tensors):
                fresh[: len(self.rows)] = self.tensors[i][: len(self.rows)]
                self.tensors[i] = fresh
            else:
                self.tensors.append(fresh)


class RowStore:
    """All slabs, by capacity. A row's unused tail is at most 511 tokens."""

    def __init__(self) -> None:
        self._slabs: dict[int, Slab] = {}

    @property
    def slabs(self) -> list[Slab]:
        return [slab for slab in self._slabs.values() if slab.rows]

    def fork(self, prompt: PromptKV) -> Row:
        """A row that continues the prompt, on a copy of it."""
        return self._slab(prompt.length + 1).add(prompt.tensors, prompt.length)

    def make_room(self, row: Row) -> None:
        """For one more token; a full row moves to a slab of the next class."""
        if row.length < row.slab.capacity:
            return
        moved = self._slab(row.length + 1).add(row.views(), row.length)
        row.slab.remove(row)
        row.slab, row.index = moved.slab, moved.index
        row.slab.rows[row.index] = row

    def free(self, row: Row) -> None:
        row.slab.remove(row)

    def clear(self) -> None:
        self._slabs.clear()

    def _slab(self, length: int) -> Slab:
        capacity = capacity_class(length)
        return self._slabs.setdefault(capacity, Slab(capacity))


def capacity_class(length: int) -> int:
    """Powers of two from 64 to 512, then multiples of 512: few classes while sequences are
    short, little waste once they are long."""
    if length > _COARSEST:
        return -(-length // _COARSEST) * _COARSEST
    return max(_FINEST, 1 << (length - 1).bit_length())


def causal_mask(num_queries: int, past: int, like: Tensor) -> Tensor:
    """[n, past + n]: 0 where a query sees a key, -inf where the key comes later."""
    mask = like.new_full((num_queries, past + num_queries), float("-inf"))
    return torch.triu(mask, diagonal=past + 1)
