from __future__ import annotations

import numpy as np
import pytest
import torch

from backends.sampling.choice import Rule, choose, draw, stream
from tests.unit.sampling.material import MakeEngine, outcomes, prompt, request, result

V = 12


def softmax(logits: np.ndarray, temperature: float) -> np.ndarray:
    weights = np.exp((logits - logits.max()) / temperature)
    return weights / weights.sum()


def filtered(logits: np.ndarray, rule: Rule) -> np.ndarray:
    """What top-k and then top-p leave, straight from their definition."""
    probs = softmax(logits, rule.temperature)
    order = np.argsort(-probs)
    if rule.top_k > 0:
        probs[order[rule.top_k :]] = 0
        probs /= probs.sum()
    kept, mass = [], 0.0
    for token in order:
        if mass >= rule.top_p and kept:
            break
        kept.append(token)
        mass += probs[token]
    out = np.zeros_like(probs)
    out[kept] = probs[kept]
    return out / out.sum()


@pytest.mark.parametrize(
    "rule",
    [
        Rule(1.0),
        Rule(0.4),
        Rule(2.5),
        Rule(1.0, top_k=3),
        Rule(1.3, top_p=0.6),
        Rule(0.8, top_k=5, top_p=0.7),
        Rule(1.0, top_k=1),
        Rule(1.0, top_p=0.0),
        Rule(1.0, top_k=100, top_p=0.999999),
    ],
)
def test_tokens_come_with_the_frequency_of_their_probability(rule: Rule):
    logits = np.random.default_rng(5).normal(size=V) * 1.5
    expected = filtered(logits, rule)
    n = 20_000
    uniforms = ((np.arange(n) + 0.5) / n).tolist()
    rows = torch.tensor(logits, dtype=torch.float32).expand(n, V)
    counts = np.bincount(choose(rows, [rule] * n, uniforms).numpy(), minlength=V)
    # Evenly spaced uniforms leave no noise: each count is right to the rounding of its ends.
    np.testing.assert_allclose(counts / n, expected, atol=2 / n)


def test_a_stream_fits_softmax_by_chi_square():
    logits = np.random.default_rng(2).normal(size=V)
    n = 10_000
    uniforms = stream(123, 0).random((1, n))
    tokens = draw(torch.tensor(logits, dtype=torch.float32)[None], [1.0], uniforms)
    counts = np.bincount(tokens[0].numpy(), minlength=V)
    expected = softmax(logits, 1.0) * n
    # 99.9 % point of chi-square with 11 degrees of freedom.
    assert ((counts - expected) ** 2 / expected).sum() < 31.3


def test_top_p_over_a_large_flat_vocabulary_falls_back_to_the_whole_of_it():
    logits = torch.linspace(0, 1e-3, 5000)[None]
    rule = Rule(1.0, top_p=0.9)
    lowest = choose(logits, [rule], [1 - 1e-12]).item()
    assert lowest == pytest.approx(500, abs=3)
    assert choose(logits, [rule], [0.0]).item() == 4999


@pytest.mark.parametrize("temperature", [0.0, 1e-300, 1e-8])
def test_a_vanishing_temperature_is_greedy(temperature):
    logits = torch.tensor([[1.0, 3.0, 3.0 - 1e-5, -torch.inf]]) * 100
    for u in (0.0, 0.5, 1 - 2**-53):
        assert choose(logits, [Rule(temperature, top_p=0.9)], [u]).item() == 1
        assert choose(logits, [Rule(temperature)], [u]).item() == 1


def test_impossible_tokens_are_never_drawn_even_at_the_ends():
    logits = torch.tensor([[-torch.inf, 0.0, 1.0, -torch.inf]])
    assert choose(logits, [Rule(1.0)], [0.0]).item() == 1
    assert choose(logits, [Rule(1.0)], [1 - 2**-53]).item() == 2


def test_streams_are_repeatable_and_differ_by_seed_and_sample():
    draws = {
        (seed, index): stream(seed, index).random(4).tolist()
        for seed in (0, 1, -1, 2**63 + 5, 10**30)
        for index in (0, 1)
    }
    assert len({tuple(d) for d in draws.values()}) == len(draws)
    assert stream(2**63 + 5, 1).random(4).tolist() == draws[2**63 + 5, 1]


def test_a_seed_gives_the_same_tokens_alone_and_in_a_crowd(make_engine: MakeEngine, adapters):
    fields = {"temperature": 1.0, "max_tokens": 40, "adapter": adapters[0]}
    one = request("one", prompt(11), seed=7, num_samples=3, **fields)
    alone = result(make_engine(), one)
    crowd = [
        request(f"other{i}", prompt(5 + i, seed=i), seed=i, temperature=1.0, max_tokens=9 * i + 1)
        for i in range(8)
    ]
    engine = make_engine(prefill_chunk_tokens=16, max_batch_size=6)
    crowded = outcomes(engine, *crowd[:4], one, *crowd[4:])["one"]
    assert [s.tokens.tolist() for s in crowded.sequences] == [
        s.tokens.tolist() for s in alone.sequences
    ]
    assert len({tuple(s.tokens) for s in alone.sequences}) == 3


def test_without_a_seed_every_request_is_new(make_engine: MakeEngine):
    engine = make_engine()
    first, second = (
        result(engine, request("r", prompt(5), temperature=1.0, max_tokens=20)) for _ in range(2)
    )
    assert first.sequences[0].tokens.tolist() != second.sequences[0].tokens.tolist()
