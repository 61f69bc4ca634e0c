"""What the SDK computes on the client and what the server computes are the same."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from backends.losses.graph import refusal
from tests.unit.losses_graph.tracing import client_side, server_side, traced, uploaded


def neg_ll(logprobs: Tensor, weights: Tensor) -> Any:
    loss = -(logprobs * weights).sum()
    return loss, {"custom/neg_ll:sum": loss, "custom/tokens:mean": weights.sum()}


def clipped(logprobs: Tensor, old: Tensor, advantages: Tensor) -> Any:
    ratio = (logprobs - old).exp()
    bounded = torch.clamp(ratio, 0.8, 1.2)
    loss = -torch.minimum(ratio * advantages, bounded * advantages).sum()
    share = (bounded != ratio).float().mean()
    return loss, {"custom/clipped:mean": share, "custom/ratio:mean": ratio.detach().mean()}


def preference(logprobs: Tensor, weights: Tensor, margin: Tensor) -> Any:
    score = 0.1 * (logprobs * weights).sum() - margin
    return -F.logsigmoid(score), {"custom/won:mean": (score > 0).float()}


def kl_penalty(logprobs: Tensor, old: Tensor, advantages: Tensor) -> Any:
    k3 = (old - logprobs).exp() - (old - logprobs) - 1
    policy = -(logprobs - logprobs.detach()).exp() * advantages
    return (policy + 0.05 * k3).sum(), {"custom/k3:mean": k3.sum() / k3.numel()}


def masked(logprobs: Tensor, weights: Tensor, old: Tensor) -> Any:
    mask = weights > 0
    kept = torch.where(mask, logprobs, torch.zeros_like(logprobs))
    mean = kept.sum() / mask.sum().clamp(min=1)
    filled = logprobs.masked_fill(~mask, -math.inf).logsumexp(0)
    picked = logprobs[mask].sum() + logprobs[~mask].mul(0.5).sum()
    return -mean - 0.1 * filled + picked, {"custom/kept:sum": mask.sum()}


def returns(logprobs: Tensor, advantages: Tensor) -> Any:
    length = logprobs.shape[0]
    to_go = advantages.flip(0).cumsum(0).flip(0)
    steps = torch.arange(length, device=logprobs.device, dtype=logprobs.dtype)
    decay = 0.9 ** (steps[None, :] - steps[:, None])
    discounted = (torch.triu(decay) * advantages).sum(dim=1)
    loss = -(logprobs * (to_go + discounted)).sum() / length
    return loss, {"custom/first:mean": to_go[0]}


def contrast(logprobs: Tensor, old: Tensor, weights: Tensor) -> Any:
    pairs = logprobs.unsqueeze(1) - logprobs.unsqueeze(0)
    order = (weights[:, None] - weights[None, :]).sign()
    loss = F.softplus(-pairs * order).mean() + F.mse_loss(logprobs, old)
    smooth = F.huber_loss(logprobs[1:], logprobs[:-1], reduction="sum")
    return loss + smooth, {"custom/pairs:sum": order.abs().sum() / 2}


def several(logprobs: Tensor, weights: Tensor) -> Any:
    normal = F.normalize(logprobs, dim=0)
    inner = torch.einsum("i,i->", normal, weights) + torch.dot(logprobs, weights)
    both = torch.stack([logprobs, weights], dim=1)
    best = torch.max(both, dim=1).values + torch.sort(logprobs, descending=True)[0]
    ends = torch.cat([logprobs[:1], logprobs[-1:]]).norm()
    spread = logprobs.std(unbiased=False) + torch.var(weights) + logprobs.abs().amax()
    scaled = logprobs.sum() / logprobs.size(0) ** 0.5
    typed = (weights > 1).to(logprobs.dtype) @ logprobs
    ordered = logprobs.gather(0, torch.argsort(weights, stable=True))
    total = inner + best.sum() + ends + spread + scaled + typed + ordered.prod()
    return total, {"custom/best:sum": best.max(), "custom/inner:mean": inner}


def entropy(logprobs: Tensor, weights: Tensor) -> Any:
    logs = torch.log_softmax(logprobs, dim=-1)
    soft = F.softmax(logprobs, dim=-1)
    spread = -(soft * logs).sum(dim=-1)
    cross = F.kl_div(logs, F.softmax(weights, dim=-1), reduction="batchmean")
    first = logprobs[..., 0] - logprobs[:, 1:].logsumexp(dim=1)
    loss = (
        (logprobs.exp() * logprobs).sum() + spread.mean() + cross + first.sum() + logprobs.T.sum()
    )
    return loss, {"custom/entropy:mean": spread.mean()}


def distilled(logprobs: Tensor, weights: Tensor) -> Any:
    return -(logprobs * weights).sum(-1).mean(), {}


def picks(logprobs: Tensor, target_tokens: Tensor) -> Any:
    odd = target_tokens.remainder(2).bool()
    rows = F.one_hot(target_tokens.clamp(max=3), 4).float()
    return (logprobs[:, None] * rows).sum() + logprobs[odd].sum(), {"custom/odd:sum": odd.sum()}


RANKS = {"margin": 0}
OVER_TOKENS = [neg_ll, clipped, preference, kl_penalty, masked, returns, contrast, several]


def datum(length: int, seed: int) -> tuple[Tensor, dict[str, Tensor]]:
    draw = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=draw)

    return -normal(length).abs(), {
        "weights": (normal(length) > 0).float(),
        "old": -normal(length).abs(),
        "advantages": normal(length),
        "margin": torch.tensor(0.25),
        "target_tokens": torch.randint(0, 9, (length,), generator=draw),
    }


def assert_equal(
    fn: Any, ranks: dict[str, Any], data: list[tuple[Tensor, dict[str, Tensor]]]
) -> None:
    handle = traced(fn, ranks)
    loss = uploaded(handle)
    assert refusal(loss) is None
    logprobs, inputs = [one for one, _ in data], [one for _, one in data]
    total, metrics, gradients = client_side(handle, logprobs, inputs)
    ours, our_metrics, our_gradients = server_side(loss, logprobs, inputs)
    assert ours == pytest.approx(total, rel=1e-5, abs=1e-5)
    assert our_metrics == pytest.approx(metrics, rel=1e-5, abs=1e-5)
    torch.testing.assert_close(our_gradients, gradients, rtol=1e-5, atol=1e-6)


def names_of(fn: Any) -> list[str]:
    return list(fn.__code__.co_varnames[: fn.__code__.co_argcount])


@pytest.mark.parametrize("fn", [*OVER_TOKENS, picks], ids=lambda fn: fn.__name__)
def test_a_loss_over_tokens_is_what_the_client_computes(fn: Any) -> None:
    ranks = {name: RANKS.get(name, 1) for name in names_of(fn)}
    data = [datum(length, seed) for seed, length in enumerate((5, 9, 3))]
    data = [(one, {k: v for k, v in inputs.items() if k in ranks}) for one, inputs in data]
    assert_equal(fn, ranks, data)


@pytest.mark.parametrize("fn", [entropy, distilled], ids=lambda fn: fn.__name__)
def test_a_loss_over_many_targets_is_what_the_client_computes(fn: Any) -> None:
    draw = torch.Generator().manual_seed(3)
    data = [
        (
            -torch.rand(length, 4, generator=draw),
            {"weights": torch.rand(length, 4, generator=draw)},
        )
        for length in (3, 6)
    ]
    assert_equal(fn, {"logprobs": 2, "weights": 2}, data)
