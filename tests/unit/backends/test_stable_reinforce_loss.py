"""`stable_reinforce` against a float64 computation of its own, token by token from the formula in
backends/README.md, and by hand."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from backends.contract import Datum, Failure, ForwardBackward
from backends.losses import LOSSES
from backends.losses.stable_reinforce import LARGEST_WEIGHT, SUBSTITUTE
from tests.tiny_models import VOCAB_SIZE
from tests.unit.backends.material import (
    assert_close,
    gradient,
    run_all,
    run_good,
    spec,
    start_trained,
)
from tests.unit.backends.oracle import logprobs, peft_model, trainable

LOSS = "stable_reinforce"
LENGTHS = (9, 14)
PROMPT = 3


def token_loss(lp: Tensor, q: float, a: float, kl_coeff: float) -> Tensor:
    """One token of the formula, in Python floats but for lp."""
    if a == 0:
        return torch.zeros_like(lp)
    r = math.exp(lp.item() - q)
    outside = (a > 0 and r > 1.2) or (a < 0 and r < 0.8)
    weight = 0.0 if outside else min(r, 5.0)
    return -weight * a * lp + kl_coeff / 2 * (lp - q) ** 2


def datum_near(length: int, seed: int, spread: float, real) -> Datum:
    """Random tokens, with q drawn around the real log-probabilities of the targets."""
    rng = np.random.default_rng(seed)
    targets = rng.integers(0, VOCAB_SIZE, length)
    made = Datum(tokens=rng.integers(0, VOCAB_SIZE, length), loss_inputs={"target_tokens": targets})
    q = real(made).detach().numpy() + rng.normal(0, spread, length)
    advantages = rng.normal(0, 1, length)
    for values in (q, advantages):
        values[:PROMPT] = 0
    inputs = {"logprobs": q.astype(np.float32), "advantages": advantages.astype(np.float32)}
    return Datum(tokens=made.tokens, loss_inputs={"target_tokens": targets, **inputs})


@pytest.mark.parametrize(
    ("config", "kl_coeff", "spread"),
    [({}, 0.01, 0.3), ({"kl_coeff": 0.0}, 0.0, 0.3), ({"kl_coeff": 0.7}, 0.7, 1.5)],
)
def test_value_and_gradient_are_those_of_float64(
    config, kl_coeff, spread, model_path, load_model, new_trainer, tmp_path: Path
):
    trainer = new_trainer(model_path, 16)
    folder = start_trained(trainer, load_model(model_path), "r", spec(), tmp_path / "start")
    reference = peft_model(model_path, folder)

    def real(datum: Datum) -> Tensor:
        targets = torch.from_numpy(datum.loss_inputs["target_tokens"])
        return logprobs(reference, torch.from_numpy(datum.tokens), targets)

    data = tuple(datum_near(n, seed, spread, real) for seed, n in enumerate(LENGTHS))
    (result,) = run_good(
        trainer, ForwardBackward(run="r", data=data, loss=LOSS, loss_config=config)
    )
    expected = torch.zeros((), dtype=torch.float64)
    for datum, output in zip(data, result.outputs, strict=True):
        lp = real(datum)
        q, advantages = (datum.loss_inputs[n].tolist() for n in ("logprobs", "advantages"))
        losses = [
            token_loss(p, q_, a, kl_coeff) for p, q_, a in zip(lp, q, advantages, strict=True)
        ]
        wanted = torch.stack(losses)
        expected = expected + wanted.sum()
        np.testing.assert_allclose(output["logprobs"], lp.detach(), rtol=0, atol=1e-4)
        np.testing.assert_allclose(
            output["elementwise_loss"], wanted.detach(), rtol=1e-3, atol=1e-3
        )
    assert result.metrics["loss:sum"] == pytest.approx(expected.item(), rel=1e-4, abs=1e-3)
    assert 0 < result.metrics["clip_fraction:mean"] < 1
    assert result.metrics[SUBSTITUTE] == 1.0
    expected.backward()
    assert_close(
        gradient(trainer, "r", tmp_path / "after"),
        {n: p.grad for n, p in trainable(reference).items()},
        relative=5e-5,
    )


def compute(lp: list[float], config=None, **inputs: list[float]):
    leaf = torch.tensor(lp, requires_grad=True)
    tensors = {name: torch.tensor(values) for name, values in inputs.items()}
    value, metrics = LOSSES[LOSS].compute(leaf, tensors, config or {})
    value.sum().backward()
    return value.detach(), leaf.grad, {name: float(v) for name, v in metrics.items()}


def test_by_hand():
    """Ratios 1.5, 0.5, 1.5, 0.5 with advantages 1, -1, -1, 1: the first two have been pushed far
    enough, the others are on their way back and keep their weight."""
    lp = [math.log(1.5), math.log(0.5)] * 2
    value, grad, metrics = compute(
        lp, {"kl_coeff": 0.0}, logprobs=[0.0] * 4, advantages=[1.0, -1.0, -1.0, 1.0]
    )
    torch.testing.assert_close(value, torch.tensor([0.0, 0.0, 1.5 * lp[0], -0.5 * lp[1]]))
    torch.testing.assert_close(grad, torch.tensor([0.0, 0.0, 1.5, -0.5]))
    assert metrics["clip_fraction:mean"] == 0.5
    assert metrics["num_tokens:sum"] == 4
    assert metrics["ratio:mean"] == pytest.approx(1.0)


def test_on_policy_it_is_reinforce():
    lp, advantages = [-1.0, -2.0, -0.5], [1.0, -2.0, 0.5]
    _, grad, metrics = compute(lp, logprobs=lp, advantages=advantages)
    torch.testing.assert_close(grad, -torch.tensor(advantages))
    assert metrics["clip_fraction:mean"] == 0


def test_the_weight_of_a_token_that_grew_likely_is_bounded():
    _, grad, _ = compute([-1.0], {"kl_coeff": 0.0}, logprobs=[-40.0], advantages=[-1.0])
    assert grad.item() == LARGEST_WEIGHT


def test_the_divergence_pulls_back_also_where_the_weight_is_gone():
    _, grad, _ = compute([0.0], {"kl_coeff": 0.5}, logprobs=[-2.0], advantages=[1.0])
    assert grad.item() == pytest.approx(0.5 * 2.0)


def test_without_recorded_logprobs_the_policy_is_its_own_sampler():
    value, grad, metrics = compute([-1.0, -2.0], advantages=[1.0, 0.0])
    torch.testing.assert_close(grad, torch.tensor([-1.0, 0.0]))
    torch.testing.assert_close(value, torch.tensor([1.0, 0.0]))
    assert metrics["ratio:mean"] == 1.0


def test_tokens_without_advantage_add_nothing_however_odd_their_q():
    value, grad, metrics = compute([-1.0, -2.0], logprobs=[-1000.0, -2.0], advantages=[0.0, 1.0])
    assert value[0] == 0
    assert grad[0] == 0
    assert grad[1] != 0
    assert all(math.isfinite(v) for v in metrics.values())


def test_a_setting_in_words_is_the_users_failure(trainer):
    trainer.create("r", spec())
    inputs = {"target_tokens": np.array([1, 2]), "advantages": np.ones(2, np.float32)}
    request = ForwardBackward(
        run="r",
        data=(Datum(tokens=np.array([3, 4]), loss_inputs=inputs),),
        loss=LOSS,
        loss_config={"kl_coeff": "large"},
    )
    (failure,) = run_all(trainer, [request])
    assert isinstance(failure, Failure)
    assert failure.category == "user"
    assert "kl_coeff" in failure.message
