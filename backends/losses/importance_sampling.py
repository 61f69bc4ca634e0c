"""REINFORCE corrected for the policy that sampled."""

from __future__ import annotations

from torch import Tensor

from backends.losses.base import (
    POLICY_SIGNATURE,
    Config,
    Inputs,
    Loss,
    Metrics,
    log_ratio,
    policy_metrics,
)


def importance_sampling(logprobs: Tensor, inputs: Inputs, config: Config) -> tuple[Tensor, Metrics]:
    """-r A with r = exp(lp - q)."""
    ratio = log_ratio(logprobs, inputs).exp()
    return -ratio * inputs["advantages"], policy_metrics(logprobs, inputs, ratio)


LOSS = Loss(POLICY_SIGNATURE, importance_sampling)
