"""How much an operation makes, known before it runs.

Each rule takes the call and its arguments and gives (elements made at most, elements worked on).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from backends.losses.graph.arguments import tensors_in
from backends.losses.graph.limits import MAX_ITEMS, RefusedError

Call = Callable[..., Any]
Args = tuple[Any, ...]
Kwargs = dict[str, Any]
Need = tuple[int, int]
Rule = Callable[[Call, Args, Kwargs], Need]

_MAX_OPERANDS = 2


def _tensors(args: Args, kwargs: Kwargs) -> list[Tensor]:
    return [*tensors_in(args), *tensors_in(tuple(kwargs.values()))]


def nothing(call: Call, args: Args, kwargs: Kwargs) -> Need:
    """Numbers, shapes, and views of what is there."""
    return 0, 0


def largest(call: Call, args: Args, kwargs: Kwargs) -> Need:
    """No more than its largest argument."""
    most = max((tensor.numel() for tensor in _tensors(args, kwargs)), default=0)
    return most, most


def reduced(call: Call, args: Args, kwargs: Kwargs) -> Need:
    """A look at everything, for a result that is smaller or a view of it."""
    return 0, largest(call, args, kwargs)[1]


def together(call: Call, args: Args, kwargs: Kwargs) -> Need:
    """All arguments side by side."""
    made = sum(tensor.numel() for tensor in _tensors(args, kwargs))
    return made, made


def broadcast(call: Call, args: Args, kwargs: Kwargs) -> Need:
    """All arguments stretched to one shape."""
    shapes = [tensor.shape for tensor in _tensors(args, kwargs)]
    dims = max(map(len, shapes), default=0)
    sizes = [1] * dims
    for shape in shapes:
        for position, size in enumerate(shape, dims - len(shape)):
            sizes[position] = max(sizes[position], size)
    most = math.prod(sizes)
    return most, most


def in_between(call: Call, args: Args, kwargs: Kwargs) -> Need:
    """The same, with several more of that size on the way and for the gradient."""
    most, work = broadcast(call, args, kwargs)
    return 4 * most, work


def product(call: Call, args: Args, kwargs: Kwargs) -> Need:
    """Each element of one with each of the others."""
    most = math.prod(tensor.numel() for tensor in _tensors(args, kwargs))
    return most, most


def rehearsed(call: Call, args: Args, kwargs: Kwargs) -> Need:
    """Whatever torch says when it is called with shapes alone."""
    made = _rehearse(call, args, kwargs)
    return made, made + sum(tensor.numel() for tensor in _tensors(args, kwargs))


def contraction(call: Call, args: Args, kwargs: Kwargs) -> Need:
    """Products of two tensors: for [m, k] and [k, n] the square root below is m k n."""
    tensors = _tensors(args, kwargs)
    if len(tensors) > _MAX_OPERANDS:
        raise RefusedError(f"has {len(tensors)} operands; the limit is {_MAX_OPERANDS}")
    made = _rehearse(call, args, kwargs)
    sizes = [tensor.numel() for tensor in tensors]
    return made, made + sum(sizes) + math.isqrt(math.prod(sizes) * max(made, 1))


def batched(call: Call, args: Args, kwargs: Kwargs) -> Need:
    """The same, where each tensor is repeated for the batch of the other."""
    made, work = contraction(call, args, kwargs)
    tensors = _tensors(args, kwargs)
    if all(tensor.dim() <= 2 for tensor in tensors):
        return made, work
    batch = math.prod(torch.broadcast_shapes(*(tensor.shape[:-2] for tensor in tensors)))
    repeated = batch * sum(math.prod(tensor.shape[-2:]) for tensor in tensors)
    return made + repeated, work + repeated


def factory(call: Call, args: Args, kwargs: Kwargs) -> Need:
    """New tensors of a given shape."""
    with torch.no_grad():
        made = call(*_shapes_only(args), **{**_shapes_only(kwargs), "device": "meta"})
    return math.prod(made.shape), math.prod(made.shape)


def one_hot(call: Call, args: Args, kwargs: Kwargs) -> Need:
    classes = kwargs.get("num_classes", args[1] if len(args) > 1 else -1)
    if not isinstance(classes, int) or classes < 1:
        raise RefusedError("needs num_classes of at least 1")
    made = classes * sum(tensor.numel() for tensor in _tensors(args, kwargs))
    return made, made


def unbound(call: Call, args: Args, kwargs: Kwargs) -> Need:
    """One piece for each index of a dimension."""
    return _pieces(args, _size_along(args, kwargs, 1))


def split(call: Call, args: Args, kwargs: Kwargs) -> Need:
    """Pieces of a size, or of a list of sizes."""
    size = kwargs.get("split_size", args[1] if len(args) > 1 else 1)
    if isinstance(size, int):
        return _pieces(args, -(-_size_along(args, kwargs, 2) // max(size, 1)))
    return _pieces(args, len(size))


def chunks(call: Call, args: Args, kwargs: Kwargs) -> Need:
    """A number of pieces."""
    number = kwargs.get("chunks", args[1] if len(args) > 1 else 1)
    return _pieces(args, number if isinstance(number, int) else len(number))


def _size_along(args: Args, kwargs: Kwargs, position: int) -> int:
    return args[0].shape[kwargs.get("dim", args[position] if len(args) > position else 0)]


def _pieces(args: Args, number: int) -> Need:
    if number > MAX_ITEMS:
        raise RefusedError(f"would make {number} pieces; the limit is {MAX_ITEMS}")
    return 0, args[0].numel()


def indexed(call: Call, args: Args, kwargs: Kwargs) -> Need:
    """x[index]: a mask picks at most all of what it covers."""
    if len(args) != 2 or kwargs:
        raise RefusedError("takes a value and an index")
    value, index = args
    if not isinstance(value, Tensor):
        if not isinstance(value, tuple | list) or not isinstance(index, int | slice):
            raise RefusedError(f"cannot take [{type(index).__name__}] of {type(value).__name__}")
        return 0, 0
    parts = index if isinstance(index, tuple) else (index,)
    if not any(isinstance(part, Tensor | list) for part in parts):
        # A view costs nothing, but its gradient is as large as what it is a view of.
        return 0, value.numel() // 16
    made = _rehearse(call, (value, tuple(p for part in parts for p in _all_of_mask(part))), {})
    return made, made + value.numel()


def _all_of_mask(part: Any) -> list[Any]:
    """What a mask stands for in an index: a position in each of its dimensions for each hit."""
    if not isinstance(part, Tensor) or part.dtype not in (torch.bool, torch.uint8):
        return [part]
    positions = torch.empty(part.numel(), dtype=torch.int64, device="meta")
    return [positions] * part.dim()


def _rehearse(call: Call, args: Args, kwargs: Kwargs) -> int:
    with torch.no_grad():
        result = call(*_shapes_only(args), **_shapes_only(kwargs))
    return sum(math.prod(tensor.shape) for tensor in tensors_in((result,)))


def _shapes_only(value: Any) -> Any:
    """The same with tensors that hold no numbers."""
    if isinstance(value, Tensor):
        return torch.empty(value.shape, dtype=value.dtype, device="meta")
    if isinstance(value, dict):
        return {name: _shapes_only(item) for name, item in value.items()}
    if isinstance(value, list):
        return [_shapes_only(item) for item in value]
    if isinstance(value, tuple) and not isinstance(value, torch.Size):
        return tuple(_shapes_only(item) for item in value)
    return value
