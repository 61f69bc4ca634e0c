"""Everything that a graph may call. What is not here cannot be reached.

Left out on purpose: whatever is random, works in place, reads memory that nobody wrote (`empty`,
`as_strided`), leaves torch (`item`), loads or compiles, or costs more than its size says (`svd`).
"""

from __future__ import annotations

import operator

import torch
import torch.nn.functional as F
from torch import Tensor

from backends.losses.graph import sizes
from backends.losses.graph.operations import (
    Operation,
    all_of,
    attribute,
    converted,
    einsum,
    plain_norm,
)
from backends.losses.graph.scalars import MATH, OPERATORS
from backends.losses.graph.shared import shared

METHODS: dict[str, Operation] = {
    **shared(Tensor),
    **all_of(Tensor, ("view", "view_as", "reshape_as", "contiguous"), sizes.reduced, 4),
    **all_of(Tensor, ("expand", "expand_as", "repeat", "unfold"), sizes.rehearsed),
    **all_of(Tensor, ("size", "dim", "ndimension", "numel", "nelement"), sizes.nothing),
    **all_of(Tensor, ("float", "double", "half", "bfloat16"), sizes.largest),
    **all_of(Tensor, ("long", "int", "short", "bool", "type_as"), sizes.largest),
    **all_of(Tensor, ("new_zeros", "new_ones", "new_full"), sizes.rehearsed),
    "where": Operation(lambda chosen, condition, other: torch.where(condition, chosen, other)),
    "to": Operation(converted, sizes.largest),
    "type": Operation(converted, sizes.largest, most_args=2),
    "cpu": Operation(lambda tensor: tensor, sizes.nothing),
    "cuda": Operation(lambda tensor: tensor, sizes.nothing),
}

# ---------------------------------------------------------------- torch.nn.functional

_ACTIVATIONS = {
    **dict.fromkeys(("relu", "relu6", "silu", "mish", "hardsigmoid", "hardswish"), 1),
    **dict.fromkeys(("selu", "softsign", "tanhshrink", "sigmoid", "tanh", "logsigmoid"), 1),
    **dict.fromkeys(("elu", "celu", "leaky_relu", "gelu", "softshrink", "hardshrink"), 2),
    **dict.fromkeys(("hardtanh", "threshold", "softplus"), 3),
    **dict.fromkeys(("softmax", "log_softmax", "softmin"), 4),
}
_DISTANCES = (
    *("mse_loss", "l1_loss", "smooth_l1_loss", "huber_loss", "kl_div", "poisson_nll_loss"),
    *("binary_cross_entropy_with_logits", "gaussian_nll_loss"),
    *("soft_margin_loss", "margin_ranking_loss", "hinge_embedding_loss", "pairwise_distance"),
)
_FUNCTIONAL: dict[str, Operation] = {
    **{
        name: Operation(getattr(F, name), sizes.largest, 8, most_args)
        for name, most_args in _ACTIVATIONS.items()
    },
    **all_of(F, _DISTANCES, sizes.in_between, weight=32),
    **all_of(F, ("binary_cross_entropy",), sizes.in_between, weight=256),
    **all_of(F, ("nll_loss", "cross_entropy", "layer_norm"), sizes.largest, weight=16),
    "normalize": Operation(F.normalize, sizes.largest, 4, most_args=4),
    "cosine_similarity": Operation(torch.cosine_similarity, sizes.in_between, 8),
    "pad": Operation(F.pad, sizes.rehearsed),
    "one_hot": Operation(F.one_hot, sizes.one_hot),
}

_SPECIAL = ("expit", "entr", "erf", "erfc", "erfinv", "log_ndtr", "ndtr", "psi", "gammaln")
_SPECIAL_PAIRS = ("xlogy", "xlog1py")
_JOINS = ("cat", "concat", "concatenate", "stack", "hstack", "vstack", "dstack", "column_stack")

_TORCH: dict[str, Operation] = {
    **shared(torch),
    **all_of(torch, _JOINS, sizes.together),
    **all_of(torch, ("meshgrid", "broadcast_tensors"), sizes.rehearsed),
    **all_of(torch, ("zeros", "ones", "full", "arange", "linspace", "eye"), sizes.factory),
    **all_of(torch, ("zeros_like", "ones_like", "full_like"), sizes.largest),
    **all_of(torch, ("bucketize", "searchsorted"), sizes.largest, weight=16),
    **all_of(torch, ("rsub", "std_mean", "var_mean"), sizes.broadcast, weight=2),
    **all_of(torch, ("cosine_similarity", "pairwise_distance"), sizes.in_between, weight=8),
    "cdist": Operation(torch.cdist, sizes.batched, weight=4, most_args=4),
    "tensordot": Operation(torch.tensordot, sizes.contraction, most_args=3),
    "einsum": Operation(einsum, sizes.contraction),
}

FUNCTIONS: dict[str, Operation] = {
    "getattr": Operation(attribute, sizes.reduced, most_args=2),
    "operator.getitem": Operation(operator.getitem, sizes.indexed, 64, most_args=2),
    "operator.matmul": Operation(torch.matmul, sizes.batched, most_args=2),
    **{f"operator.{name}": Operation(call, weight=4) for name, call in OPERATORS.items()},
    **{f"math.{name}": Operation(call, sizes.nothing) for name, call in MATH.items()},
    **{f"torch.{name}": operation for name, operation in _TORCH.items()},
    **{f"torch.nn.functional.{name}": operation for name, operation in _FUNCTIONAL.items()},
    **{
        f"torch.special.{name}": operation
        for name, operation in {
            **all_of(torch.special, _SPECIAL, sizes.largest, weight=32),
            **all_of(torch.special, ("logit",), sizes.largest, weight=256),
            **all_of(torch.special, _SPECIAL_PAIRS, sizes.broadcast, weight=16),
            **all_of(torch.special, ("softmax", "log_softmax", "logsumexp"), sizes.largest, 8),
        }.items()
    },
    "torch.linalg.norm": Operation(plain_norm, sizes.reduced, weight=4, most_args=4),
    "torch.linalg.vector_norm": Operation(torch.linalg.vector_norm, sizes.reduced, weight=4),
}

_PREFIXES = {
    "builtins.": "",
    "_operator.": "operator.",
    "torch.functional.": "torch.",
    "torch._C._nn.": "torch.nn.functional.",
    "torch._C._special.special_": "torch.special.",
    "torch._C._linalg.linalg_": "torch.linalg.",
    "torch.nn.functional._": "torch.nn.functional.",
}
_SPELLED = {"torch.nn.functional.log_sigmoid": "torch.nn.functional.logsigmoid"}


def public_name(target: str) -> str:
    """A function by the name in the documentation; a trace may have the one of its home."""
    for private, public in _PREFIXES.items():
        if target.startswith(private):
            target = public + target.removeprefix(private)
            break
    return _SPELLED.get(target, target)
