"""Choosing tokens: temperature, top-k, top-p, and one stream of chance a continuation.

Shapes: M rows, V vocabulary, K draws a row.
"""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from backends.sampling.requests import GREEDY_BELOW

PROMPT_STREAM = 2**64 - 1
"""The stream that draws alternatives to prompt tokens; continuations count from 0."""

_LIKELY_ENOUGH = 1024
"""Top-p rarely keeps more tokens than this, and finding them is far cheaper than a full sort."""


@dataclass(frozen=True, slots=True)
class Rule:
    """How a row's token is chosen; top_k <= 0 and top_p >= 1 turn the filters off."""

    temperature: float
    top_k: int = -1
    top_p: float = 1.0

    @property
    def greedy(self) -> bool:
        return self.temperature < GREEDY_BELOW

    @property
    def filtered(self) -> bool:
        return self.top_k > 0 or self.top_p < 1.0


def fresh_seed() -> int:
    return secrets.randbits(64)


def stream(seed: int, index: int) -> np.random.Generator:
    """Independent for every (seed, index), and owned by one continuation: what it draws does
    not depend on who else is in the batch."""
    key = np.array([seed % 2**64, index], dtype=np.uint64)
    return np.random.Generator(np.random.Philox(key=key))


def choose(logits: Tensor, rules: Sequence[Rule], uniforms: Sequence[float]) -> Tensor:
    """int64[M]: one token for each row of logits[M, V], by uniforms in [0, 1)."""
    tokens = logits.argmax(dim=-1)
    plain = [i for i, rule in enumerate(rules) if not rule.greedy and not rule.filtered]
    if plain:
        temperatures = [rules[i].temperature for i in plain]
        u = np.array([[uniforms[i]] for i in plain])
        tokens[plain] = draw(logits[plain], temperatures, u)[:, 0]
    for i, rule in enumerate(rules):
        if rule.filtered and not rule.greedy:
            tokens[i] = _draw_filtered(logits[i], rule, uniforms[i])
    return tokens


def draw(logits: Tensor, temperatures: Sequence[float], uniforms: np.ndarray) -> Tensor:
    """int64[M, K]: independent draws from softmax(logits[M, V] / temperature), by inverse CDF
    in float64 in the order of token ids. Every temperature is positive."""
    temperature = torch.tensor(temperatures, dtype=torch.float64, device=logits.device)
    return _inverse_cdf(_weights(logits, temperature[:, None]), uniforms)


def _draw_filtered(logits: Tensor, rule: Rule, uniform: float) -> Tensor:
    """int64[]: temperature first, then top-k, then top-p of what top-k left."""
    vocab = len(logits)
    count = min(rule.top_k, vocab) if rule.top_k > 0 else vocab
    few = min(count, _LIKELY_ENOUGH) if rule.top_p < 1.0 else count
    best, ids = logits.topk(few)
    weights = _weights(best, rule.temperature)
    if rule.top_p < 1.0:
        total = weights.sum() if few == count else _weights(logits, rule.temperature).sum()
        if few < count and weights.sum() < rule.top_p * total:
            best, ids = logits.topk(count)
            weights = _weights(best, rule.temperature)
        mass_before = weights.cumsum(0) - weights
        keep = mass_before < rule.top_p * total
        keep[0] = True
        weights = weights * keep
    return ids[_inverse_cdf(weights[None], np.array([[uniform]]))[0, 0]]


def _weights(logits: Tensor, temperature: Tensor | float) -> Tensor:
    """float64, 1 at the best token: unnormalized probabilities that cannot overflow."""
    wide = logits.double()
    return wide.sub_(wide.amax(dim=-1, keepdim=True)).div_(temperature).exp_()


def _inverse_cdf(weights: Tensor, uniforms: np.ndarray) -> Tensor:
    """int64[M, K] from weights[M, V], uniforms[M, K]; never an index of weight zero."""
    cdf = weights.cumsum(dim=-1)
    total = cdf[:, -1:]
    goal = torch.as_tensor(uniforms, dtype=torch.float64, device=weights.device) * total
    # A product that rounds up to the total would point past the last token.
    goal = torch.minimum(goal, torch.nextafter(total, torch.zeros_like(total)))
    return torch.searchsorted(cdf, goal, right=True)
