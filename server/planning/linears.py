"""The linear layers of a decoder layer and its head, whole or as the share of one rank.

Megatron splits a *column*-parallel layer by its outputs and a *row*-parallel one by its inputs.
An adapter follows: of a column layer A is whole on every rank and B is split, of a row layer A is
split and B is whole.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from server.planning.shapes import ModelShape

GROUPS = ("attn", "mlp", "unembed")
Group = Literal["attn", "mlp", "unembed"]


@dataclass(frozen=True, slots=True)
class Linear:
    """`copies` of one shape: more than one where there are experts."""

    group: Group
    parallel: Literal["column", "row"]
    num_in: int
    num_out: int
    bias: bool = False
    copies: int = 1

    def parameters(self, tensor: int = 1) -> int:
        """On one of `tensor` ranks. The bias of a row layer is whole."""
        column = self.parallel == "column"
        weight = _share(self.num_in * self.num_out, tensor)
        bias = _share(self.num_out, tensor if column else 1) if self.bias else 0
        return self.copies * (weight + bias)

    def adapter_numbers(self, rank: int, tensor: int = 1) -> int:
        column = self.parallel == "column"
        a = self.num_in if column else _share(self.num_in, tensor)
        b = _share(self.num_out, tensor) if column else self.num_out
        return self.copies * rank * (a + b)


def attention(shape: ModelShape) -> list[Linear]:
    hidden, query, kv = shape.hidden_size, shape.query_size, shape.kv_size
    return [
        Linear("attn", "column", hidden, query, shape.qkv_bias),
        Linear("attn", "column", hidden, kv, shape.qkv_bias),
        Linear("attn", "column", hidden, kv, shape.qkv_bias),
        Linear("attn", "row", query, hidden, shape.out_bias),
    ]


def mlp(shape: ModelShape) -> list[Linear]:
    """Gate, up and down."""
    return _gated(shape.hidden_size, shape.intermediate_size, shape.mlp_bias, 1)


def experts(shape: ModelShape, expert: int = 1) -> list[Linear]:
    """Those of one of `expert` ranks."""
    assert shape.experts is not None
    return _gated(shape.hidden_size, shape.experts.width, False, shape.experts.count // expert)


def head(shape: ModelShape) -> Linear:
    return Linear("unembed", "column", shape.hidden_size, shape.vocab_size)


def of_layer(shape: ModelShape, layer: int, expert: int = 1) -> list[Linear]:
    sparse = layer in shape.expert_layers
    return attention(shape) + (experts(shape, expert) if sparse else mlp(shape))


def adapter_numbers(
    linears: Iterable[Linear], rank: int, groups: Iterable[str], tensor: int
) -> int:
    """Numbers of one adapter on `groups` of these layers."""
    wanted = set(groups)
    return sum(one.adapter_numbers(rank, tensor) for one in linears if one.group in wanted)


def _gated(hidden: int, width: int, bias: bool, copies: int) -> list[Linear]:
    up = Linear("mlp", "column", hidden, width, bias, copies)
    return [up, up, Linear("mlp", "row", width, hidden, bias, copies)]


def _share(size: int, ranks: int) -> int:
    """The largest of nearly equal parts."""
    return -(-size // ranks)
