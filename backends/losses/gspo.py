"""Group sequence policy optimization: one importance ratio a sequence."""

from __future__ import annotations

import torch
from torch import Tensor

from backends.contract import LossSignature
from backends.losses.base import (
    CLIPPED_SIGNATURE,
    Config,
    Inputs,
    Loss,
    Metrics,
    clipped_objective,
    masked_mean,
    policy_metrics,
)


def gspo(logprobs: Tensor, inputs: Inputs, config: Config) -> tuple[Tensor, Metrics]:
    """-min(s_t A, clip(s_t, low, high) A), s_t = sg[s] exp(lp_t - sg[lp_t]) and s = exp(mean of
    lp - q over `sequence_ratio_mask` != 0): the value of the sequence's ratio, the gradient of
    the token's own lp (GSPO-token, Zheng et al., 2025, arXiv:2507.18071, section 4.3).

    An empty mask gives s = 1. Thresholds default as for ppo, which is ours: the paper's own are
    far tighter (3e-4 and 4e-4 around 1). `clip_fraction:mean` as for ppo.
    """
    advantages = inputs["advantages"]
    difference = (logprobs - inputs["logprobs"]).detach()
    log_s = masked_mean(difference, inputs["sequence_ratio_mask"] != 0)
    # Where A = 0 the ratio stays 1, lest an overflowing s turn 0 * inf into NaN.
    log_s = torch.where(advantages != 0, log_s, torch.zeros_like(difference))
    ratio = (log_s + logprobs - logprobs.detach()).exp()
    loss, clipped = clipped_objective(ratio, inputs, config)
    metrics = policy_metrics(logprobs, inputs, ratio)
    metrics["clip_fraction:mean"] = masked_mean(clipped.to(ratio.dtype), advantages != 0)
    return loss, metrics


LOSS = Loss(
    LossSignature(
        required=(*CLIPPED_SIGNATURE.required, "sequence_ratio_mask"),
        optional=CLIPPED_SIGNATURE.optional,
        config=CLIPPED_SIGNATURE.config,
    ),
    gspo,
)
