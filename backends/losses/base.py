"""What a loss is, and what the ratio losses share.

Shapes: N positions of one datum, K targets a position. lp = log p(target) under the adapter,
q = the `logprobs` input (log-probability under the policy that sampled), A = `advantages`.
Every loss is summed over tokens and datums, never averaged, so that requests of any size add up.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from backends.contract import LossSignature

Inputs = Mapping[str, Tensor]
Config = Mapping[str, float | str]
Metrics = dict[str, Tensor]
"""Scalars of one datum; the suffix after the colon says how datums combine (`sum`, `mean`)."""

DEFAULT_CLIP_LOW = 0.8
DEFAULT_CLIP_HIGH = 1.2
_CLIP_NAMES = ("clip_low_threshold", "clip_high_threshold")


@dataclass(frozen=True, slots=True)
class Loss:
    signature: LossSignature
    compute: Callable[[Tensor, Inputs, Config], tuple[Tensor, Metrics]]
    """(lp, inputs, config) of one datum -> (elementwise loss shaped as lp, extra metrics).
    lp is float32 (or float64, in tests) [N] or [N, K]; the inputs have its dtype. The loss may
    also be a scalar."""
    raw_inputs: bool = False
    """The inputs come as they were sent, `target_tokens` too, and on the CPU."""


class LossRefusedError(Exception):
    """The loss cannot be computed; the message says why."""


POLICY_SIGNATURE = LossSignature(required=("target_tokens", "logprobs", "advantages"))
CLIPPED_SIGNATURE = LossSignature(
    required=POLICY_SIGNATURE.required, optional=_CLIP_NAMES, config=_CLIP_NAMES
)


def log_ratio(logprobs: Tensor, inputs: Inputs) -> Tensor:
    """lp - q, and 0 where A = 0: such a token adds nothing to the loss, and must not make a NaN
    of it either (0 * inf) when its q is a placeholder."""
    difference = logprobs - inputs["logprobs"]
    return torch.where(inputs["advantages"] != 0, difference, torch.zeros_like(difference))


def clip(ratio: Tensor, inputs: Inputs, config: Config) -> Tensor:
    """The ratio kept within absolute thresholds: per-token inputs win over the config, the
    config over the defaults 0.8 and 1.2."""
    low, high = (
        inputs[name] if name in inputs else ratio.new_tensor(float(config.get(name, default)))
        for name, default in zip(_CLIP_NAMES, (DEFAULT_CLIP_LOW, DEFAULT_CLIP_HIGH), strict=True)
    )
    return torch.clamp(ratio, low, high)


def clipped_objective(ratio: Tensor, inputs: Inputs, config: Config) -> tuple[Tensor, Tensor]:
    """-min(r A, clip(r) A) per token, and whether the clipped branch was the smaller one."""
    advantages = inputs["advantages"]
    free = ratio * advantages
    clipped = clip(ratio, inputs, config) * advantages
    return -torch.minimum(free, clipped), clipped < free


def policy_metrics(logprobs: Tensor, inputs: Inputs, ratio: Tensor) -> Metrics:
    """Over the tokens with A != 0: their number, the mean ratio (1 if there are none), and the
    mean of q - lp, an estimate of KL(q || p) on what q sampled."""
    mask = inputs["advantages"] != 0
    moved = (inputs["logprobs"] - logprobs).detach()
    return {
        "num_tokens:sum": mask.sum(),
        "ratio:mean": masked_mean(ratio.detach(), mask, empty=1.0),
        "kl_q_p:mean": masked_mean(moved, mask),
    }


def masked_mean(values: Tensor, mask: Tensor, empty: float = 0.0) -> Tensor:
    """Mean of values[N] where mask[N] holds, `empty` where it holds nowhere."""
    count = mask.sum()
    total = torch.where(mask, values, torch.zeros_like(values)).sum()
    return torch.where(count > 0, total / count.clamp(min=1), torch.full_like(total, empty))
