"""Python's own numbers: the functions of `operator` and `math`, kept from growing."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable
from typing import Any

from torch import Tensor

from backends.losses.graph.limits import RefusedError

_MAX_BITS = 64


def arithmetic(function: Callable[..., Any]) -> Callable[..., Any]:
    """An operator for tensors and numbers: not for texts, which it would format, or lists, which
    it would repeat."""

    def call(*values: Any) -> Any:
        for value in values:
            if not isinstance(value, Tensor | int | float):
                raise RefusedError(f"cannot work on a {type(value).__name__}")
        return function(*values)

    return call


def _add(a: Any, b: Any) -> Any:
    if isinstance(a, tuple | list) and isinstance(b, tuple | list):
        return (*a, *b)
    return arithmetic(operator.add)(a, b)


def _power(base: Any, exponent: Any) -> Any:
    whole = isinstance(base, int) and isinstance(exponent, int)
    if whole and abs(base) > 1 and base.bit_length() * exponent > _MAX_BITS:
        raise RefusedError(f"{base} to the power of a {exponent.bit_length()}-bit number")
    return base**exponent


def _shift_left(a: Any, b: Any) -> Any:
    if isinstance(a, int) and isinstance(b, int) and b > _MAX_BITS:
        raise RefusedError(f"shifts by {b} bits")
    return a << b


def _numbers_only(function: Callable[..., Any]) -> Callable[..., Any]:
    def call(*values: Any) -> Any:
        for value in values:
            if not isinstance(value, int | float):
                raise RefusedError(f"takes numbers, not a {type(value).__name__}")
        return function(*values)

    return call


_OPERATORS = (
    *("abs", "neg", "pos", "sub", "mul", "truediv", "floordiv", "mod"),
    *("eq", "ne", "lt", "le", "gt", "ge"),
    *("and_", "or_", "xor", "invert", "inv", "rshift"),
)
OPERATORS: dict[str, Callable[..., Any]] = {
    **{name: arithmetic(getattr(operator, name)) for name in _OPERATORS},
    "add": _add,
    "pow": arithmetic(_power),
    "lshift": arithmetic(_shift_left),
}

_MATH = (
    *("sqrt", "exp", "expm1", "log", "log2", "log10", "log1p", "pow", "fabs", "copysign"),
    *("sin", "cos", "tan", "asin", "acos", "atan", "atan2", "sinh", "cosh", "tanh", "hypot"),
    *("floor", "ceil", "trunc", "isnan", "isinf", "isfinite", "erf", "erfc", "lgamma", "gamma"),
)
MATH: dict[str, Callable[..., Any]] = {name: _numbers_only(getattr(math, name)) for name in _MATH}
