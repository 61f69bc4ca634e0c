"""Proximal policy optimization: the clipped surrogate, token by token."""

from __future__ import annotations

from torch import Tensor

from backends.losses.base import (
    CLIPPED_SIGNATURE,
    Config,
    Inputs,
    Loss,
    Metrics,
    clipped_objective,
    log_ratio,
    masked_mean,
    policy_metrics,
)


def ppo(logprobs: Tensor, inputs: Inputs, config: Config) -> tuple[Tensor, Metrics]:
    """-min(r A, clip(r, low, high) A) with r = exp(lp - q) (Schulman et al., 2017,
    arXiv:1707.06347, eq. 7). `clip_fraction:mean`: share of tokens with A != 0 that clipping
    holds back."""
    ratio = log_ratio(logprobs, inputs).exp()
    loss, clipped = clipped_objective(ratio, inputs, config)
    metrics = policy_metrics(logprobs, inputs, ratio)
    metrics["clip_fraction:mean"] = masked_mean(clipped.to(ratio.dtype), inputs["advantages"] != 0)
    return loss, metrics


LOSS = Loss(CLIPPED_SIGNATURE, ppo)
