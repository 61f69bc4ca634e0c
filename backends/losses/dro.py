"""Direct reward optimization: off-policy, held near the sampling policy by a square."""

from __future__ import annotations

from torch import Tensor

from backends.contract import LossSignature
from backends.losses.base import (
    POLICY_SIGNATURE,
    Config,
    Inputs,
    Loss,
    Metrics,
    log_ratio,
    policy_metrics,
)

DEFAULT_BETA = 0.05
"""Ours: the vendor's example uses it, and documents no default."""


def dro(logprobs: Tensor, inputs: Inputs, config: Config) -> tuple[Tensor, Metrics]:
    """-(lp A - beta / 2 (lp - q)^2) (Richemond et al., 2024, arXiv:2405.19107).

    The square counts at every token, A = 0 included, as the vendor's formula has it: a prompt
    must be sent with the logprobs it really had.
    """
    beta = float(config.get("beta", DEFAULT_BETA))
    square = (logprobs - inputs["logprobs"]) ** 2
    ratio = log_ratio(logprobs, inputs).exp()
    loss = -(logprobs * inputs["advantages"] - 0.5 * beta * square)
    return loss, policy_metrics(logprobs, inputs, ratio)


LOSS = Loss(LossSignature(required=POLICY_SIGNATURE.required, config=("beta",)), dro)
