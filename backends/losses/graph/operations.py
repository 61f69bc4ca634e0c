"""What the tables of functions and methods are made of."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from backends.losses.graph import sizes
from backends.losses.graph.limits import RefusedError


@dataclass(frozen=True, slots=True)
class Operation:
    """One thing that a node may call."""

    call: Callable[..., Any]
    size: sizes.Rule = sizes.broadcast
    weight: int = 1
    """What it costs for an element, forwards and backwards, where an addition costs 1."""
    most_args: int = 8
    """Positional ones: what torch would take beyond them (`out`, `inplace`) is not for graphs."""


def all_of(
    owner: ModuleType | type[Tensor],
    names: Iterable[str],
    size: sizes.Rule,
    weight: int = 1,
    most_args: int = 8,
) -> dict[str, Operation]:
    return {name: Operation(getattr(owner, name), size, weight, most_args) for name in names}


def attribute(value: Any, name: str) -> Any:
    """`getattr`, for these and nothing else."""
    if isinstance(value, Tensor) and name in _OF_TENSORS:
        return _OF_TENSORS[name](value)
    if type(value).__module__ == "torch.return_types" and name in _OF_RESULTS:
        return getattr(value, name)
    raise RefusedError(f"a {type(value).__name__} has no {name[:40]!r} here")


_OF_TENSORS: dict[str, Callable[[Tensor], Any]] = {
    "shape": lambda tensor: tensor.shape,
    "ndim": lambda tensor: tensor.ndim,
    "dtype": lambda tensor: tensor.dtype,
    "device": lambda tensor: tensor.device,
    "T": lambda tensor: tensor.t() if tensor.ndim <= 2 else tensor.permute(*_reversed(tensor)),
    "mT": lambda tensor: tensor.mT,
}
_OF_RESULTS = frozenset({"values", "indices", "min", "max"})
ATTRIBUTES = frozenset(_OF_TENSORS) | _OF_RESULTS


def _reversed(tensor: Tensor) -> range:
    return range(tensor.ndim - 1, -1, -1)


def converted(tensor: Tensor, *targets: Any, dtype: Any = None, other: Any = None) -> Tensor:
    """`to`: only the type changes; whatever the device, losses run on the CPU."""
    for target in (*targets, dtype, other):
        if isinstance(target, Tensor | torch.dtype):
            return tensor.to(target.dtype if isinstance(target, Tensor) else target)
    return tensor


def norm(
    tensor: Tensor, p: Any = "fro", dim: Any = None, keepdim: bool = False, dtype: Any = None
) -> Tensor:
    if p is not None and p != "fro" and not isinstance(p, int | float):
        raise RefusedError(f"p is {str(p)[:40]!r}; it must be a number")
    order = 2 if p is None or p == "fro" else p
    return torch.linalg.vector_norm(tensor, order, dim, keepdim, dtype=dtype)


def plain_norm(
    tensor: Tensor, ord: Any = None, dim: Any = None, keepdim: bool = False, dtype: Any = None
) -> Tensor:
    """`linalg.norm` where it is the norm of a vector; that of a matrix may need its SVD."""
    if ord is not None and not isinstance(ord, int | float):
        raise RefusedError("ord must be a number")
    if ord is not None and (tensor.dim() != 1 if dim is None else not isinstance(dim, int)):
        raise RefusedError("with ord is for vectors only")
    return torch.linalg.vector_norm(tensor, 2 if ord is None else ord, dim, keepdim, dtype=dtype)


def where(condition: Any, input: Any, other: Any) -> Tensor:
    return torch.where(condition, input, other)


def diff(input: Tensor, n: int = 1, dim: int = -1, prepend: Any = None, append: Any = None) -> Any:
    if n not in (0, 1, 2):
        raise RefusedError(f"n is {n}; it may be up to 2")
    return torch.diff(input, n, dim, prepend, append)


def einsum(equation: str, *operands: Any) -> Tensor:
    return torch.einsum(equation, *operands)
