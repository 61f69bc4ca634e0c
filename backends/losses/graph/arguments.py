"""Arguments as they travel: JSON, with one-key objects for what JSON has no word for.

Reading makes a template: the value itself, with a `Ref` where an earlier node's value goes.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from backends.losses.graph.limits import (
    MAX_ARGUMENT_DEPTH,
    MAX_TEXT,
    RefusedError,
    check_length,
)

_DTYPE_NAMES = (
    *("float64", "double", "float32", "float", "float16", "half", "bfloat16"),
    *("int64", "long", "int32", "int", "int16", "short", "int8", "uint8", "bool"),
)
_DTYPES: dict[str, torch.dtype] = {name: getattr(torch, name) for name in _DTYPE_NAMES}
_DEVICE = re.compile(r"(cpu|cuda|mps)(:\d{1,3})?")
_MEMORY_FORMATS = ("contiguous_format", "preserve_format")
_INT64 = 2**63


@dataclass(frozen=True, slots=True)
class Ref:
    """The value of an earlier node."""

    name: str


def read(value: Any, known: Mapping[str, object], depth: int = 0) -> Any:
    """The template of one argument. Raises RefusedError."""
    if depth > MAX_ARGUMENT_DEPTH:
        raise RefusedError(f"nests arguments deeper than {MAX_ARGUMENT_DEPTH}")
    if isinstance(value, list | tuple):
        check_length(len(value))
        return [read(item, known, depth + 1) for item in value]
    if isinstance(value, dict):
        return _read_object(value, known, depth + 1)
    if isinstance(value, str):
        return _text(value)
    if isinstance(value, int) and not -_INT64 <= value < _INT64:
        raise RefusedError("has an integer beyond 64 bits")
    if value is None or isinstance(value, int | float):
        return value
    raise RefusedError(f"has an argument of type {type(value).__name__}")


def _text(value: str) -> str:
    if len(value) > MAX_TEXT:
        raise RefusedError(f"has a text of {len(value)} characters; the limit is {MAX_TEXT}")
    return value


def _read_object(value: dict[str, Any], known: Mapping[str, object], depth: int) -> Any:
    if len(value) != 1:
        raise RefusedError(f"has an argument with {len(value)} keys; it must have one")
    [(kind, content)] = value.items()
    if kind == "ref":
        if not isinstance(content, str) or content not in known:
            raise RefusedError(f"refers to {str(content)[:80]!r}, which is no node before it")
        return Ref(content)
    if kind in ("tuple", "slice"):
        items = read(content, known, depth)
        if not isinstance(items, list) or (kind == "slice" and len(items) != 3):
            raise RefusedError(f"has a {kind} that is no list of its parts")
        return tuple(items) if kind == "tuple" else slice(*items)
    if kind == "ellipsis":
        return Ellipsis
    reader = _NAMED.get(kind)
    if reader is None or not isinstance(content, str):
        raise RefusedError(f"has an argument of the unknown kind {kind[:80]!r}")
    return reader(content)


def _float(text: str) -> float:
    if text not in ("inf", "-inf", "nan"):
        raise RefusedError(f"has the float {text[:40]!r}; it must be inf, -inf or nan")
    return float(text)


def _dtype(name: str) -> torch.dtype:
    if name not in _DTYPES:
        raise RefusedError(f"has the dtype {name[:40]!r}; known are {', '.join(_DTYPES)}")
    return _DTYPES[name]


def _device(name: str) -> torch.device:
    """Losses run on the CPU, whatever they ask for."""
    if not _DEVICE.fullmatch(name):
        raise RefusedError(f"has the device {name[:40]!r}")
    return torch.device("cpu")


def _layout(name: str) -> None:
    if name != "strided":
        raise RefusedError(f"has the layout {name[:40]!r}; only strided is possible")


def _memory_format(name: str) -> None:
    if name not in _MEMORY_FORMATS:
        raise RefusedError(f"has the memory format {name[:40]!r}")


_NAMED: dict[str, Callable[[str], Any]] = {
    "float": _float,
    "dtype": _dtype,
    "device": _device,
    "layout": _layout,
    "memory_format": _memory_format,
}


def num_items(template: Any) -> int:
    """How many values are in it, at any depth."""
    if isinstance(template, list | tuple):
        return 1 + sum(num_items(item) for item in template)
    return 1


def fill(template: Any, values: Mapping[str, Any]) -> Any:
    """The argument, with the values of the nodes in it."""
    if isinstance(template, Ref):
        return values[template.name]
    if isinstance(template, list | tuple):
        items = [fill(item, values) for item in template]
        for part, item in zip(template, items, strict=True):
            if isinstance(part, Ref) and isinstance(item, list | tuple):
                # Lists of lists of ... would double with every node.
                raise RefusedError(f"puts the list {part.name!r} into another")
        return items if isinstance(template, list) else tuple(items)
    if isinstance(template, slice):
        parts = (template.start, template.stop, template.step)
        return slice(*(fill(part, values) for part in parts))
    return template


def tensors_in(values: Any) -> Iterator[torch.Tensor]:
    """All tensors in lists and tuples of any depth."""
    if isinstance(values, torch.Tensor):
        yield values
    elif isinstance(values, list | tuple) and not isinstance(values, torch.Size):
        for value in values:
            yield from tensors_in(value)
