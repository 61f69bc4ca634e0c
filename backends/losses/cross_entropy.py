"""Weighted negative log-likelihood of the targets."""

from __future__ import annotations

import torch
from torch import Tensor

from backends.contract import LossSignature
from backends.losses.base import Config, Inputs, Loss, Metrics


def cross_entropy(logprobs: Tensor, inputs: Inputs, config: Config) -> tuple[Tensor, Metrics]:
    """-lp * w, with w = `weights` (ones if absent, any sign), [N] or [N, K].

    `num_tokens:sum` counts the positions with a weight other than 0.
    """
    weights = inputs.get("weights")
    if weights is None:
        weights = torch.ones_like(logprobs)
    positions = (weights != 0).reshape(len(weights), -1).any(dim=1)
    return -logprobs * weights, {"num_tokens:sum": positions.sum()}


LOSS = Loss(
    LossSignature(required=("target_tokens",), optional=("weights",), many_targets=True),
    cross_entropy,
)
