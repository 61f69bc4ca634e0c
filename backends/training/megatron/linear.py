"""Megatron's parallel linear layers under many adapters.

A rank has some output columns of a column-parallel layer and some inputs of a row-parallel one,
and of the adapters the same: A whole and those rows of B, or those columns of A and B whole. So
its low-rank products are parts of the same sums as its base product, and are added before the
layer's own communication: adapters have none of theirs. What a rank finds for a matrix that others
have too is one summand of its gradient (`ranks.py` adds them up, once for a pass).

Shapes: T tokens, I inputs and O outputs of this rank, R rank of a part's adapters.
"""

from __future__ import annotations

from collections.abc import Sequence

from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear
from megatron.core.tensor_parallel.mappings import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
    reduce_from_tensor_model_parallel_region,
    reduce_scatter_to_sequence_parallel_region,
)
from torch import Tensor

from backends.lora.linear import Branch, BranchedLinear, Segments, anchor


class Branches:
    """The original layers that are fused in one of Megatron's, side by side in its output."""

    def __init__(self, sizes: Sequence[tuple[str, int]], segments: Segments) -> None:
        self._columns: dict[str, slice] = {}
        self._segments = segments
        start = 0
        for module, size in sizes:
            self._columns[module] = slice(start, start + size)
            start += size

    def __call__(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """x[..., I] -> [..., O]"""
        branches = [
            Branch(module, columns, part)
            for module, columns in self._columns.items()
            for part in self._segments.parts(module)
        ]
        seen = anchor([branch.part for branch in branches])
        y = BranchedLinear.apply(x.flatten(0, -2), weight, bias, branches, seen)
        return y.unflatten(0, x.shape[:-1])


def adapt_column(
    layer: ColumnParallelLinear, sizes: Sequence[tuple[str, int]], segments: Segments
) -> None:
    """Put adapters of the modules `sizes`, names and output columns, into the layer's forward."""
    branches = Branches(sizes, segments)

    def forward(hidden: Tensor) -> tuple[Tensor, Tensor | None]:
        """hidden[T, 1, I], or this rank's rows of it with sequence parallelism -> [T, 1, O]"""
        if layer.sequence_parallel:
            x = gather_from_sequence_parallel_region(hidden, group=layer.tp_group)
        else:
            x = copy_to_tensor_model_parallel_region(hidden, group=layer.tp_group)
        bias, left = (None, layer.bias) if layer.skip_bias_add else (layer.bias, None)
        return branches(x, layer.weight, bias), left

    layer.forward = forward


def adapt_row(layer: RowParallelLinear, module: str, segments: Segments) -> None:
    """Put adapters of the module into the layer's forward."""
    branches = Branches([(module, layer.output_size)], segments)

    def forward(x: Tensor) -> tuple[Tensor, Tensor | None]:
        """x[T, 1, I] -> [T, 1, O], or this rank's rows of it with sequence parallelism"""
        partial = branches(x, layer.weight, None)
        if layer.sequence_parallel:
            y = reduce_scatter_to_sequence_parallel_region(partial, group=layer.tp_group)
        else:
            y = reduce_from_tensor_model_parallel_region(partial, group=layer.tp_group)
        if layer.skip_bias_add or layer.bias is None:
            return y, layer.bias
        return y + layer.bias, None

    layer.forward = forward
