"""What is a function of `torch` and a method of its tensors alike."""

from __future__ import annotations

from types import ModuleType

from torch import Tensor

from backends.losses.graph import sizes
from backends.losses.graph.operations import Operation, all_of, diff, norm, where

_CHEAP = (
    *("abs", "neg", "positive", "square", "sign", "floor", "ceil", "round", "trunc", "frac"),
    *("reciprocal", "isnan", "isinf", "isfinite", "logical_not", "bitwise_not", "nan_to_num"),
    *("relu", "deg2rad", "rad2deg", "signbit"),
)
_COSTLY = (
    *("exp", "exp2", "expm1", "log", "log2", "log10", "log1p", "sqrt", "rsqrt", "sigmoid"),
    *("sin", "cos", "tan", "asin", "acos", "atan", "sinh", "cosh", "tanh", "asinh"),
    *("acosh", "atanh", "erf", "erfc", "sinc", "softmax", "log_softmax"),
)
_COSTLIEST = ("erfinv", "lgamma", "digamma", "cumprod", "logcumsumexp")
_PAIRS = (
    *("add", "sub", "subtract", "mul", "multiply", "div", "divide", "true_divide"),
    *("floor_divide", "remainder", "fmod", "maximum", "minimum", "fmax", "fmin"),
    *("eq", "ne", "lt", "le", "gt", "ge", "not_equal", "less", "less_equal", "greater"),
    *("greater_equal", "logical_and", "logical_or", "logical_xor", "bitwise_and", "bitwise_or"),
    *("bitwise_xor", "clamp", "clip", "clamp_min", "clamp_max", "lerp", "addcmul", "addcdiv"),
    *("masked_fill", "heaviside", "copysign"),
)
_COSTLY_PAIRS = ("pow", "float_power", "atan2", "hypot", "xlogy", "logaddexp", "logaddexp2")
_REDUCTIONS = (
    *("sum", "mean", "nansum", "nanmean", "amax", "amin", "argmax", "argmin", "all"),
    *("any", "std", "var", "count_nonzero", "aminmax", "trace", "logsumexp"),
)
_SCANS = (
    "cumsum",
    "prod",
    "cummax",
    "cummin",
    "gather",
    "scatter",
    "scatter_add",
    "index_add",
    "masked_scatter",
    "take",
)
_SORTS = ("sort", "argsort", "msort", "topk", "kthvalue", "median", "nanmedian", "mode")
_VIEWS = (
    *("reshape", "flatten", "unflatten", "ravel", "squeeze", "unsqueeze", "transpose", "permute"),
    *("t", "swapaxes", "swapdims", "moveaxis", "movedim", "narrow", "select", "diagonal"),
    "detach",
)
_COPIES = ("flip", "fliplr", "flipud", "roll", "clone", "triu", "tril")
_REHEARSED = (*("tile", "broadcast_to", "diag", "diag_embed", "index_select", "take_along_dim"),)
_CONTRACTIONS = ("mm", "bmm", "mv", "dot", "vdot", "inner", "outer", "ger")


def shared(owner: ModuleType | type[Tensor]) -> dict[str, Operation]:
    """These are functions of `torch` and methods of its tensors alike."""
    return {
        **all_of(owner, _CHEAP, sizes.largest),
        **all_of(owner, _COSTLY, sizes.largest, weight=8),
        **all_of(owner, _COSTLIEST, sizes.largest, weight=64),
        **all_of(owner, ("logit",), sizes.largest, weight=256),
        **all_of(owner, _PAIRS, sizes.broadcast),
        **all_of(owner, _COSTLY_PAIRS, sizes.broadcast, weight=16),
        **all_of(owner, ("max", "min"), sizes.broadcast),
        **all_of(owner, ("masked_select",), sizes.broadcast, weight=8),
        **all_of(owner, ("dist", "isclose"), sizes.in_between, weight=8),
        **all_of(owner, _REDUCTIONS, sizes.reduced, weight=4),
        **all_of(owner, _SCANS, sizes.largest, weight=32),
        **all_of(owner, _SORTS, sizes.largest, weight=64),
        **all_of(owner, ("quantile", "nanquantile"), sizes.product, weight=64),
        **all_of(owner, _VIEWS, sizes.reduced, weight=4),
        **all_of(owner, _COPIES, sizes.largest, weight=2),
        **all_of(owner, _REHEARSED, sizes.rehearsed, weight=2),
        **all_of(owner, ("repeat_interleave",), sizes.rehearsed, weight=2, most_args=3),
        **all_of(owner, _CONTRACTIONS, sizes.contraction),
        **all_of(owner, ("matmul",), sizes.batched),
        **all_of(owner, ("split",), sizes.split),
        **all_of(owner, ("chunk", "tensor_split"), sizes.chunks),
        **all_of(owner, ("unbind",), sizes.unbound),
        "where": Operation(where),
        "diff": Operation(diff, sizes.together, weight=4),
        "norm": Operation(norm, sizes.reduced, weight=4, most_args=4),
    }
