"""Every loss, value and gradient, through the whole trainer against float64 transformers + peft
and formulas written out token by token from the vendor's documentation."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import pytest
import torch
from torch import Tensor

from backends.contract import Datum, Failure, ForwardBackward
from backends.losses import LOSSES
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

LENGTHS = (9, 14)
PROMPT = 3


def _clip(r: float, low: float, high: float) -> float:
    return max(low, min(high, r))


def _cross_entropy(lp: Tensor, inputs: dict[str, Tensor], config: dict[str, float]) -> Tensor:
    weights = inputs.get("weights", torch.ones_like(lp))
    return sum(-p * w for p, w in zip(lp.reshape(-1), weights.reshape(-1), strict=True))


def _ratio_loss(per_token: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Sum per_token(lp, q, A, low, high, config) over the tokens of a datum."""

    def loss(lp: Tensor, inputs: dict[str, Tensor], config: dict[str, float]) -> Tensor:
        low, high = (
            inputs.get(name, torch.full_like(lp, config.get(name, default))).tolist()
            for name, default in (("clip_low_threshold", 0.8), ("clip_high_threshold", 1.2))
        )
        q, advantages = inputs["logprobs"].tolist(), inputs["advantages"].tolist()
        tokens = zip(lp, q, advantages, low, high, strict=True)
        return sum(per_token(*token, config) for token in tokens)

    return loss


def _importance_sampling(lp, q, a, low, high, config):
    return -(lp - q).exp() * a


def _ppo(lp, q, a, low, high, config):
    r = (lp - q).exp()
    clipped = _clip(r.item(), low, high)
    return -r * a if r.item() * a <= clipped * a else torch.zeros_like(lp) - clipped * a


def _cispo(lp, q, a, low, high, config):
    return -_clip(math.exp(lp.item() - q), low, high) * lp * a


def _dro(lp, q, a, low, high, config):
    return -(lp * a - config.get("beta", 0.05) / 2 * (lp - q) ** 2)


def _gspo(lp: Tensor, inputs: dict[str, Tensor], config: dict[str, float]) -> Tensor:
    low, high = config.get("clip_low_threshold", 0.8), config.get("clip_high_threshold", 1.2)
    marked = [i for i, m in enumerate(inputs["sequence_ratio_mask"].tolist()) if m != 0]
    q = inputs["logprobs"].tolist()
    s = math.exp(sum(lp[i].item() - q[i] for i in marked) / len(marked))
    total = torch.zeros((), dtype=lp.dtype)
    for p, a in zip(lp, inputs["advantages"].tolist(), strict=True):
        # d s_t / d lp_t = s, so the free branch is s * a with the slope of p.
        total = total - (
            s * a * (1 + p - p.item())
            if s * a <= _clip(s, low, high) * a
            else _clip(s, low, high) * a
        )
    return total


@dataclass(frozen=True)
class Case:
    loss: str
    expected: Callable[..., Tensor]
    inputs: tuple[str, ...] = ("logprobs", "advantages")
    config: dict[str, float] = field(default_factory=dict)
    k: int | None = None
    spread: float = 0.4
    """How far q is from lp: beyond log 1.2 tokens get clipped."""


CLIPS = {"clip_low_threshold": 0.95, "clip_high_threshold": 1.02}
GSPO = ("logprobs", "advantages", "sequence_ratio_mask")
CASES = {
    "cross_entropy": Case("cross_entropy", _cross_entropy, ("weights",)),
    "cross_entropy_plain": Case("cross_entropy", _cross_entropy, ()),
    "cross_entropy_nk": Case("cross_entropy", _cross_entropy, ("weights",), k=3),
    "importance_sampling": Case("importance_sampling", _ratio_loss(_importance_sampling)),
    "ppo": Case("ppo", _ratio_loss(_ppo)),
    "ppo_config": Case("ppo", _ratio_loss(_ppo), config=CLIPS),
    "ppo_inputs": Case(
        "ppo",
        _ratio_loss(_ppo),
        ("logprobs", "advantages", "clip_low_threshold", "clip_high_threshold"),
        CLIPS,
    ),
    "cispo": Case("cispo", _ratio_loss(_cispo)),
    "cispo_config": Case("cispo", _ratio_loss(_cispo), config=CLIPS),
    "cispo_inputs": Case(
        "cispo", _ratio_loss(_cispo), ("logprobs", "advantages", "clip_high_threshold")
    ),
    "dro": Case("dro", _ratio_loss(_dro)),
    "dro_beta": Case("dro", _ratio_loss(_dro), config={"beta": 0.5}),
    "gspo": Case("gspo", _gspo, GSPO, spread=0.2),
    "gspo_config": Case(
        "gspo", _gspo, GSPO, {"clip_low_threshold": 0.99, "clip_high_threshold": 1.01}
    ),
}


def _datum(case: Case, length: int, seed: int, near: Callable[[Datum], np.ndarray]) -> Datum:
    """Random inputs; `near` gives the real target logprobs, which q is drawn around."""
    rng = np.random.default_rng(seed)
    shape = (length,) if case.k is None else (length, case.k)
    targets = rng.integers(0, VOCAB_SIZE, shape)
    datum = Datum(
        tokens=rng.integers(0, VOCAB_SIZE, length), loss_inputs={"target_tokens": targets}
    )
    q = near(datum) + rng.normal(0.1, case.spread, shape)
    advantages = rng.normal(0, 1, shape)
    mask = np.ones(shape)
    for values in (q, advantages, mask):
        values[:PROMPT] = 0
    drawn = {
        "weights": rng.normal(0, 1, shape),
        "logprobs": q,
        "advantages": advantages,
        "sequence_ratio_mask": mask,
        "clip_low_threshold": rng.uniform(0.7, 0.95, shape),
        "clip_high_threshold": rng.uniform(1.05, 1.3, shape),
    }
    inputs = {name: drawn[name].astype(np.float32) for name in case.inputs}
    return Datum(tokens=datum.tokens, loss_inputs={"target_tokens": targets, **inputs})


@pytest.mark.parametrize("name", CASES)
def test_value_outputs_and_adapter_gradient(name, model_path, load_model, new_trainer, tmp_path):
    case = CASES[name]
    trainer = new_trainer(model_path, 16)
    folder = start_trained(trainer, load_model(model_path), "r", spec(), tmp_path / "start")
    reference = peft_model(model_path, folder)

    def real(datum: Datum) -> Tensor:
        tokens = torch.from_numpy(datum.tokens)
        return logprobs(reference, tokens, torch.from_numpy(datum.loss_inputs["target_tokens"]))

    data = tuple(
        _datum(case, length, seed, lambda d: real(d).detach().numpy())
        for seed, length in enumerate(LENGTHS)
    )
    (result,) = run_good(
        trainer, ForwardBackward(run="r", data=data, loss=case.loss, loss_config=case.config)
    )
    expected = torch.zeros((), dtype=torch.float64)
    for datum, output in zip(data, result.outputs, strict=True):
        lp = real(datum)
        inputs = {k: torch.from_numpy(v).double() for k, v in datum.loss_inputs.items()}
        value = case.expected(lp, inputs, case.config)
        expected = expected + value
        np.testing.assert_allclose(output["logprobs"], lp.detach(), rtol=0, atol=1e-4)
        assert output["logprobs"].shape == output["elementwise_loss"].shape == lp.shape
        assert output["logprobs"].dtype == output["elementwise_loss"].dtype == np.float32
        np.testing.assert_allclose(
            output["elementwise_loss"].sum(), value.item(), rtol=1e-4, atol=1e-4
        )
    assert result.metrics["loss:sum"] == pytest.approx(expected.item(), rel=1e-4, abs=1e-4)
    expected.backward()
    wanted = {n: p.grad for n, p in trainable(reference).items()}
    assert_close(gradient(trainer, "r", tmp_path / "after"), wanted, relative=2e-5)


def _compute(loss: str, lp: list[float], config=None, **inputs: list[float]):
    leaf = torch.tensor(lp, requires_grad=True)
    tensors = {name: torch.tensor(values) for name, values in inputs.items()}
    value, metrics = LOSSES[loss].compute(leaf, tensors, config or {})
    value.sum().backward()
    return value.detach(), leaf.grad, {name: float(v) for name, v in metrics.items()}


def test_ppo_by_hand():
    """Ratios 1.5, 0.5, 1.5, 1 with advantages 1, -1, -1, 2: the first two are clipped."""
    lp = [math.log(1.5), math.log(0.5), math.log(1.5), 0.0]
    value, grad, metrics = _compute(
        "ppo", lp, logprobs=[0.0] * 4, advantages=[1.0, -1.0, -1.0, 2.0]
    )
    torch.testing.assert_close(value, torch.tensor([-1.2, 0.8, 1.5, -2.0]))
    torch.testing.assert_close(grad, torch.tensor([0.0, 0.0, 1.5, -2.0]))
    assert metrics["clip_fraction:mean"] == 0.5
    assert metrics["ratio:mean"] == pytest.approx((1.5 + 0.5 + 1.5 + 1) / 4)
    assert metrics["num_tokens:sum"] == 4


def test_gspo_gives_every_token_the_sequence_ratio_and_its_own_gradient():
    """Masked log-ratios 0.1 and 0.3 make s = exp(0.2); token 0 is outside the mask."""
    value, grad, _ = _compute(
        "gspo",
        [-1.0, -0.9, -0.7],
        {"clip_high_threshold": 2.0},
        logprobs=[-5.0, -1.0, -1.0],
        advantages=[1.0, 2.0, -1.0],
        sequence_ratio_mask=[0.0, 1.0, 1.0],
    )
    s = math.exp(0.2)
    torch.testing.assert_close(value, torch.tensor([-s, -2 * s, s]))
    torch.testing.assert_close(grad, torch.tensor([-s, -2 * s, s]))


@pytest.mark.parametrize("loss", ["importance_sampling", "ppo", "cispo", "gspo"])
def test_tokens_without_advantage_add_nothing_however_odd_their_q(loss):
    """A placeholder of -1000 for q would make exp(lp - q) infinite, and inf * 0 a NaN."""
    value, grad, metrics = _compute(
        loss,
        [-1.0, -2.0],
        logprobs=[-1000.0, -2.0],
        advantages=[0.0, 1.0],
        sequence_ratio_mask=[0.0, 1.0],
    )
    assert value[0] == 0
    assert grad[0] == 0
    assert grad[1] != 0
    assert all(math.isfinite(v) for v in metrics.values())


@pytest.mark.parametrize("loss", sorted(LOSSES))
def test_a_datum_without_any_trained_token_has_finite_metrics(loss):
    zeros = [0.0, 0.0]
    names = ("weights", "advantages", "logprobs", "sequence_ratio_mask")
    value, _, metrics = _compute(loss, [-1.0, -2.0], **dict.fromkeys(names, zeros))
    assert torch.isfinite(value).all()
    assert metrics["num_tokens:sum"] == 0
    assert all(math.isfinite(v) for v in metrics.values())


def test_metrics_have_one_colon_and_mean_is_over_datums(trainer):
    trainer.create("r", spec())
    case = CASES["ppo"]
    data = tuple(_datum(case, n, n, lambda d: np.zeros(len(d.tokens))) for n in (6, 12))
    together, *alone = run_good(
        trainer,
        *(ForwardBackward(run="r", data=d, loss="ppo") for d in (data, data[:1], data[1:])),
    )
    assert set(together.metrics) == {
        "loss:sum",
        "num_tokens:sum",
        "ratio:mean",
        "kl_q_p:mean",
        "clip_fraction:mean",
    }
    for name, value in together.metrics.items():
        total = sum(result.metrics[name] for result in alone)
        assert value == pytest.approx(total / 2 if name.endswith(":mean") else total, rel=1e-5)


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"loss": "no_such_loss"}, "unknown"),
        ({"loss_config": {"beta": 1.0}}, "beta"),
        ({"loss_config": {"clip_low_threshold": math.nan}}, "clip_low_threshold"),
    ],
)
def test_an_impossible_loss_is_the_users_failure(trainer, change, sentence):
    trainer.create("r", spec())
    data = (_datum(CASES["ppo"], 5, 0, lambda d: np.zeros(5)),)
    (failure,) = run_all(
        trainer, [ForwardBackward(**{"run": "r", "data": data, "loss": "ppo"} | change)]
    )
    assert isinstance(failure, Failure)
    assert failure.category == "user"
    assert sentence in failure.message
