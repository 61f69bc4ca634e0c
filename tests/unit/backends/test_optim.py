"""Steps of many runs in one call, against torch.optim.AdamW on each alone."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from backends.contract import Failure, OptimStep
from backends.optimizers.adamw import Moments, Update, step
from backends.optimizers.norms import norms

HYPERS = [
    OptimStep(run="a", learning_rate=1e-2),
    OptimStep(run="b", learning_rate=1e-2),
    OptimStep(run="c", learning_rate=3e-3, beta1=0.7, weight_decay=0.2, eps=1e-6),
    OptimStep(run="d", learning_rate=3e-3, beta2=0.99, grad_clip_norm=0.5),
    OptimStep(run="e", learning_rate=0.0, grad_clip_norm=1e9),
]


def test_runs_together_end_where_torch_takes_each_alone():
    """Their step counts differ: each joins one step after the one before."""
    torch.manual_seed(0)
    weights = [torch.randn(50 + i) for i in range(len(HYPERS))]
    moments = [Moments.zero(w) for w in weights]
    alone = [w.clone().requires_grad_() for w in weights]
    optimizers = [
        torch.optim.AdamW(
            [w],
            lr=hyper.learning_rate,
            betas=(hyper.beta1, hyper.beta2),
            eps=hyper.eps,
            weight_decay=hyper.weight_decay,
        )
        for w, hyper in zip(alone, HYPERS, strict=True)
    ]
    for now in range(len(HYPERS) + 2):
        members = range(min(now + 1, len(HYPERS)))
        gradients = [torch.randn_like(weights[i]) for i in members]
        for i in members:
            alone[i].grad = gradients[i].clone()
        updates = [
            Update(weights[i], gradients[i], moments[i], now - i, HYPERS[i]) for i in members
        ]
        expected = []
        for i in members:
            limit = HYPERS[i].grad_clip_norm or math.inf
            expected.append(torch.nn.utils.clip_grad_norm_([alone[i]], limit).item())
            optimizers[i].step()
        assert _step(updates) == pytest.approx(expected, rel=1e-5)
        for i in members:
            torch.testing.assert_close(weights[i], alone[i].detach(), rtol=1e-5, atol=1e-6)


def _step(updates: list[Update]) -> list[float | Failure]:
    return step(updates, norms([update.gradient for update in updates]))


def test_one_that_is_too_large_stays_and_the_others_go_on():
    weights = [torch.ones(4) for _ in range(3)]
    gradients = [torch.ones(4), torch.full((4,), 1e18), torch.full((4,), 1e18)]
    hypers = [HYPERS[0], HYPERS[0], HYPERS[3]]
    moments = [Moments.zero(w) for w in weights]
    first, failure, clipped = _step(
        [
            Update(*each[:3], 0, each[3])
            for each in zip(weights, gradients, moments, hypers, strict=True)
        ]
    )
    assert first == pytest.approx(2.0)
    assert isinstance(failure, Failure)
    assert "set grad_clip_norm" in failure.message
    assert clipped == pytest.approx(2e18)
    assert torch.equal(weights[1], torch.ones(4))
    assert torch.equal(gradients[1], torch.full((4,), 1e18))
    assert not moments[1].exp_avg.any()
    assert not torch.equal(weights[0], torch.ones(4))
    assert not torch.equal(weights[2], torch.ones(4))


def test_no_step_at_all_is_none():
    assert _step([]) == []


@given(st.lists(st.integers(1, 5)), st.integers(0, 2**31))
def test_norms_of_many_are_those_of_each(sizes, seed):
    generator = torch.Generator().manual_seed(seed)
    vectors = [torch.randn(size, generator=generator) for size in sizes]
    expected = [vector.double().norm().item() for vector in vectors]
    assert norms(vectors) == pytest.approx(expected, rel=1e-6)


def test_the_norm_of_a_long_vector_is_as_exact_as_float32():
    vector = torch.randn(3_000_000, generator=torch.Generator().manual_seed(0))
    assert norms([vector]) == pytest.approx([vector.double().norm().item()], rel=1e-6)


@pytest.mark.parametrize("bad", [math.inf, math.nan])
def test_norms_are_not_finite_where_an_entry_is_not(bad):
    spoiled = torch.ones(5)
    spoiled[3] = bad
    good, not_finite = norms([torch.ones(4), spoiled])
    assert good == 2.0
    assert not math.isfinite(not_finite)
