"""Keyword arguments: those that mean something, those that may be there, and no others."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from backends.contract import CustomLossNode
from backends.losses.graph.arguments import read
from backends.losses.graph.limits import RefusedError

_IGNORED = frozenset({"device", "layout", "memory_format", "non_blocking", "copy", "_stacklevel"})
_ONLY: Mapping[str, Any] = {
    **dict.fromkeys(("inplace", "requires_grad", "pin_memory"), False),
    **dict.fromkeys(("out", "generator", "size_average", "reduce"), None),
}
"""A trace may repeat these, as long as they say what is the case anyway."""
_KNOWN = frozenset(
    (
        *("a", "alpha", "append", "approximate", "atol", "b", "base", "beta", "bias", "boundaries"),
        *("chunks", "compute_mode", "condition", "correction", "decimals", "delta", "descending"),
        *("destination", "diagonal", "dim", "dim0", "dim1", "dim2", "dimension", "dims", "dtype"),
        *("end", "end_dim", "end_weight", "eps", "equal_nan", "equation", "exponent", "fill_value"),
        *("full", "ignore_index", "index", "indexing", "indices", "indices_or_sections", "input"),
        *(
            "input1",
            "input2",
            "interpolation",
            "k",
            "keepdim",
            "label_smoothing",
            "lambd",
            "largest",
        ),
        *("length", "log_input", "log_target", "margin", "mask", "mat", "mat2", "max", "max_val"),
        *("min", "min_val", "mode", "n", "nan", "negative_slope", "neginf", "normalized_shape"),
        *("num_classes", "offset", "operands", "ord", "other", "output_size", "p", "pad"),
        *("pos_weight", "posinf", "prepend", "q", "reduction", "repeats", "right", "rounding_mode"),
        *("rtol", "sections", "self", "shape", "shifts", "side", "size", "sizes", "sorted"),
        *("sorted_sequence", "sorter", "source", "split_size", "split_size_or_sections", "src"),
        *(
            "stable",
            "start",
            "start_dim",
            "step",
            "steps",
            "target",
            "tensor",
            "tensor1",
            "tensor2",
        ),
        *("tensors", "threshold", "unbiased", "upcast", "value", "values", "var", "vec", "vec2"),
        *("weight", "x", "x1", "x2", "y"),
    )
)


def keywords(node: CustomLossNode, target: str, known: Mapping[str, object]) -> dict[str, Any]:
    """The templates of a node's keyword arguments. Raises RefusedError."""
    given: dict[str, Any] = {}
    for name, value in node.kwargs.items():
        template = read(value, known)
        if name in _ONLY:
            if template is not _ONLY[name]:
                raise RefusedError(f"gives {target} {name}, which can only be {_ONLY[name]}")
        elif name in _KNOWN:
            given[name] = template
        elif name not in _IGNORED:
            raise RefusedError(f"gives {target} the keyword {name[:40]!r}")
    return given
