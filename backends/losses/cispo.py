"""Clipped importance-sampling weights on REINFORCE: clipping never silences a token."""

from __future__ import annotations

from torch import Tensor

from backends.losses.base import (
    CLIPPED_SIGNATURE,
    Config,
    Inputs,
    Loss,
    Metrics,
    clip,
    log_ratio,
    masked_mean,
    policy_metrics,
)


def cispo(logprobs: Tensor, inputs: Inputs, config: Config) -> tuple[Tensor, Metrics]:
    """-stopgrad(clip(r, low, high)) lp A with r = exp(lp - q) (MiniMax-M1, 2025,
    arXiv:2506.13585). `clip_fraction:mean`: share of tokens with A != 0 whose ratio was clipped."""
    ratio = log_ratio(logprobs, inputs).exp().detach()
    weight = clip(ratio, inputs, config)
    metrics = policy_metrics(logprobs, inputs, ratio)
    changed = (weight != ratio).to(ratio.dtype)
    metrics["clip_fraction:mean"] = masked_mean(changed, inputs["advantages"] != 0)
    return -weight * logprobs * inputs["advantages"], metrics


LOSS = Loss(CLIPPED_SIGNATURE, cispo)
