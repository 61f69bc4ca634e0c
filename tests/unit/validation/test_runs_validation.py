from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from backends.contract import (
    AdapterSpec,
    Datum,
    ForwardBackward,
    LossSignature,
    ModelInfo,
    OptimStep,
)
from server.core.errors import BadInput
from server.runs.validation import check_adapter_spec, check_forward_backward, check_optim_step

INFO = ModelInfo(
    vocab_size=100,
    max_context_length=8,
    num_parameters=1000,
    dtype="float32",
    device="cpu",
    trainable_groups=("attn", "mlp"),
    eos_token_ids=(2,),
    losses={
        "cross_entropy": LossSignature(
            required=("target_tokens",), optional=("weights",), many_targets=True
        ),
        "ppo": LossSignature(
            required=("target_tokens", "logprobs", "advantages"),
            config=("clip_low_threshold", "clip_high_threshold"),
        ),
    },
)


def datum(tokens: Any = (1, 2, 3), **inputs: Any) -> Datum:
    arrays = {"target_tokens": np.array([2, 3, 4]), **inputs}
    return Datum(
        tokens=np.array(tokens, dtype=np.int64),
        loss_inputs={name: array for name, array in arrays.items() if array is not None},
    )


def check(*data: Datum, loss: str = "cross_entropy", **config: float | str) -> None:
    check_forward_backward(
        ForwardBackward(run="run", data=data, loss=loss, loss_config=dict(config)), INFO
    )


def floats(*values: float) -> np.ndarray:
    return np.array(values, dtype=np.float32)


PPO = {"logprobs": floats(-1, -1, -1), "advantages": floats(1, 0, -1)}
MANY = np.array([[1, 2], [3, 0], [5, 6]])


def test_what_each_loss_reads_is_accepted() -> None:
    check(datum(), datum(weights=floats(0, 1, -2)), datum(weights=np.array([0, 1, 1])))
    check(datum(target_tokens=MANY, weights=np.ones((3, 2), np.float32)))
    check(datum(**PPO), loss="ppo", clip_low_threshold=0.8, clip_high_threshold=1.2)
    check(datum(**PPO), loss="ppo", clip_high_threshold=0.1)


def test_the_whole_context_and_the_whole_vocabulary_may_be_used() -> None:
    check(datum([0, 99] * 4, target_tokens=np.array([99, 0] * 4)))


REFUSED: dict[str, tuple[Datum, str]] = {
    "no token": (datum([], target_tokens=np.array([], dtype=np.int64)), "holds no token"),
    "too many tokens": (
        datum([1] * 9, target_tokens=np.ones(9, np.int64)),
        "model_input: holds 9 tokens; the limit is 8",
    ),
    "a token past the vocabulary": (
        datum([1, 2, 100]),
        "model_input: token id 100 at position 2 is outside 0 to 99",
    ),
    "a negative token": (datum([1, -1, 2]), "token id -1 at position 1"),
    "no targets": (datum(target_tokens=None), "cross_entropy needs target_tokens"),
    "an unknown input": (
        datum(mask=floats(1, 1, 1)),
        "'mask' is not known to cross_entropy, which reads target_tokens, weights",
    ),
    "targets one short": (
        datum(target_tokens=np.array([2, 3])),
        r"\['target_tokens'\]: has length 2; model_input has 3 tokens",
    ),
    "weights one too long": (datum(weights=floats(1, 1, 1, 1)), r"\['weights'\]: has length 4"),
    "targets that are floats": (datum(target_tokens=floats(1, 2, 3)), "float32; token ids are int"),
    "a target past the vocabulary": (
        datum(target_tokens=np.array([1, 2, 100])),
        r"\['target_tokens'\]: token id 100 at position 2",
    ),
    "a second target past the vocabulary": (
        datum(target_tokens=MANY + np.array([[0, 0], [0, -1], [0, 0]])),
        "token id -1 at position 1, 1",
    ),
    "weights for one target of two": (
        datum(target_tokens=MANY, weights=floats(1, 1, 1)),
        r"\['weights'\]: has shape \[3\]; target_tokens has \[3, 2\]",
    ),
    "weights for two targets of one": (
        datum(weights=np.ones((3, 2), np.float32)),
        r"\['weights'\]: has shape \[3, 2\]; target_tokens has \[3\]",
    ),
    "no target a position": (
        datum(target_tokens=np.ones((3, 0), np.int64)),
        "has 0 targets a position; it may have 1 to 1024",
    ),
    "too many targets a position": (
        datum(target_tokens=np.ones((3, 1025), np.int64)),
        "has 1025 targets a position",
    ),
    "a NaN": (
        datum(weights=floats(1, math.nan, 1)),
        r"\['weights'\]: is nan at position 1; it must be a finite number",
    ),
    "an infinity": (
        datum(target_tokens=MANY, weights=np.array([[1, 1], [1, -math.inf], [1, 1]], np.float32)),
        "is -inf at position 1, 1",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_datum_that_cannot_be_trained_on_is_refused_by_its_index(case: str) -> None:
    wrong, finding = REFUSED[case]

    with pytest.raises(BadInput, match=finding) as refused:
        check(datum(), wrong)

    assert str(refused.value).startswith("data[1].")


def test_only_a_loss_of_many_targets_takes_them() -> None:
    two = {name: np.stack([array] * 2, axis=1) for name, array in PPO.items()}

    with pytest.raises(BadInput, match=r"has shape \[3, 2\]; ppo takes \[3\] only"):
        check(datum(target_tokens=MANY, **two), loss="ppo")


def test_an_empty_batch_is_refused() -> None:
    with pytest.raises(BadInput, match="holds no datum"):
        check()


def test_an_unknown_loss_is_refused_with_the_known_ones() -> None:
    with pytest.raises(BadInput, match="'mse' is not known; known are cross_entropy, ppo"):
        check(datum(), loss="mse")


@pytest.mark.parametrize(
    ("config", "finding"),
    [
        ({"beta": 1.0}, r"\['beta'\]: is not known to ppo, which takes clip_low_threshold"),
        ({"clip_low_threshold": math.nan}, "is nan; it must be a finite number"),
        ({"clip_low_threshold": math.inf}, "is inf"),
        ({"clip_low_threshold": "0.8"}, "is '0.8'; it must be a finite number"),
        ({"clip_low_threshold": 2.0, "clip_high_threshold": 1.0}, "is 2.0, above .* 1.0"),
    ],
)
def test_a_config_the_loss_cannot_take_is_refused(
    config: dict[str, float | str], finding: str
) -> None:
    with pytest.raises(BadInput, match=finding):
        check(datum(**PPO), loss="ppo", **config)


def test_a_loss_without_config_says_that_it_takes_nothing() -> None:
    with pytest.raises(BadInput, match="cross_entropy, which takes nothing"):
        check(datum(), beta=1.0)


def step(**hyperparameters: float) -> OptimStep:
    changes: dict[str, Any] = dict(hyperparameters)
    return OptimStep(run="run", **changes)


def test_the_defaults_are_accepted() -> None:
    check_optim_step(step())


@pytest.mark.parametrize("name", ["learning_rate", "beta1", "beta2", "eps", "weight_decay"])
def test_hyperparameters_may_be_zero(name: str) -> None:
    check_optim_step(step(**{name: 0.0}))


@pytest.mark.parametrize("value", [-1e-9, math.nan, math.inf])
@pytest.mark.parametrize("name", ["learning_rate", "eps", "weight_decay", "grad_clip_norm"])
def test_hyperparameters_below_zero_or_not_finite_are_refused(name: str, value: float) -> None:
    with pytest.raises(BadInput, match=rf"adam_params.{name}: is {value}"):
        check_optim_step(step(**{name: value}))


@pytest.mark.parametrize("value", [-0.1, 1.0, math.nan, math.inf])
@pytest.mark.parametrize("name", ["beta1", "beta2"])
def test_betas_outside_their_range_are_refused(name: str, value: float) -> None:
    with pytest.raises(BadInput, match=rf"adam_params.{name}: is {value}"):
        check_optim_step(step(**{name: value}))


SPEC = AdapterSpec(rank=8, alpha=32.0, seed=0, train_attn=True, train_mlp=True, train_unembed=False)


@pytest.mark.parametrize("rank", [1, 256])
def test_ranks_of_the_range_are_accepted(rank: int) -> None:
    check_adapter_spec(replace(SPEC, rank=rank), INFO)


@pytest.mark.parametrize(
    ("change", "finding"),
    [
        ({"rank": 0}, "rank: is 0; it must be from 1 to 256"),
        ({"rank": 257}, "rank: is 257"),
        ({"alpha": 0.0}, "alpha: is 0.0"),
        ({"alpha": math.inf}, "alpha: is inf"),
        ({"train_attn": False, "train_mlp": False}, "at least one must be true"),
        ({"train_unembed": True}, "train_unembed: is true; this base model can train attn, mlp"),
    ],
)
def test_an_adapter_the_model_cannot_have_is_refused(change: dict[str, Any], finding: str) -> None:
    with pytest.raises(BadInput, match=finding):
        check_adapter_spec(replace(SPEC, **change), INFO)
