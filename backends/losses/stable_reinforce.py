"""REINFORCE that stands a difference between the policy that sampled and the one being trained.

The vendor's objective of this name is not published. What is: a REINFORCE variant, stable when
sampling lags behind (async RL) or has other numerics; it uses a little that was recorded at
sampling (Tinker documentation, "StableReinforce"); it has a number named `kl_coeff` (tinker SDK
0.38, `ForwardBackwardRequest.loss_fn_config_v2`, whose example is 0.01); advantages other than 0
stand on sampled tokens only (tinker-cookbook 0.6.1, `rl/train.py`). So what is computed here is
the closest published objective, and a metric says that it stands in; backends/README.md has why.
"""

from __future__ import annotations

import torch
from torch import Tensor

from backends.contract import LossSignature
from backends.losses.base import (
    DEFAULT_CLIP_HIGH,
    DEFAULT_CLIP_LOW,
    Config,
    Inputs,
    Loss,
    Metrics,
    log_ratio,
    masked_mean,
    policy_metrics,
)

SUBSTITUTE = "stable_reinforce_substitute:mean"
"""The metric that is 1 because this is not the vendor's own objective."""
DEFAULT_KL_COEFF = 0.01
"""Ours: the SDK's example has it, and no default is documented."""
LARGEST_WEIGHT = 5.0
"""Ours: truncated importance sampling. A token with A < 0 has no other bound."""


def stable_reinforce(logprobs: Tensor, inputs: Inputs, config: Config) -> tuple[Tensor, Metrics]:
    """Where A != 0: -sg(m min(r, 5)) lp A + kl_coeff / 2 (lp - q)^2, with r = exp(lp - q), and
    m = 0 where r has left [0.8, 1.2] on the side that A pushes it to, else 1.

    The first term is MiniRL, a REINFORCE with token-level importance weights and PPO's clipping
    as a mask (Zheng et al., "Stabilizing Reinforcement Learning with LLMs: Formulation and
    Practices", 2025, arXiv:2512.01374), with one sampling policy q for both and the thresholds
    that the vendor documents for ppo. The second is the k2 estimate of KL(p || q) (Schulman,
    "Approximating KL Divergence", 2020): near q its gradient is the divergence's own.

    Without `logprobs` q is p itself. `clip_fraction:mean`: share of tokens with A != 0 and m = 0.
    """
    advantages = inputs["advantages"]
    inputs = {"logprobs": logprobs.detach(), **inputs}
    moved = log_ratio(logprobs, inputs)
    ratio = moved.detach().exp()
    left_above = (advantages > 0) & (ratio > DEFAULT_CLIP_HIGH)
    left_below = (advantages < 0) & (ratio < DEFAULT_CLIP_LOW)
    clipped = left_above | left_below
    weight = torch.where(clipped, torch.zeros_like(ratio), ratio.clamp(max=LARGEST_WEIGHT))
    kl_coeff = float(config.get("kl_coeff", DEFAULT_KL_COEFF))
    metrics = policy_metrics(logprobs, inputs, ratio)
    metrics["clip_fraction:mean"] = masked_mean(clipped.to(ratio.dtype), advantages != 0)
    metrics[SUBSTITUTE] = ratio.new_ones(())
    return -weight * logprobs * advantages + 0.5 * kl_coeff * moved**2, metrics


LOSS = Loss(
    LossSignature(
        required=("target_tokens", "advantages"),
        optional=("logprobs",),
        config=("kl_coeff",),
        recorded=("logprobs",),
    ),
    stable_reinforce,
)
