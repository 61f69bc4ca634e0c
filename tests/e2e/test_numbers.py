"""The numbers of a pass and of a step, against transformers, peft, torch, and the documented
formulas."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tinker
import torch
from tinker import types

from tests.e2e.client import (
    DATA,
    MODEL,
    PROBE,
    UNTIED,
    adam,
    adapter_of,
    assert_same,
    download,
    fingerprint,
    fresh,
    generate,
    new_run,
    output_logprobs,
    prompt,
    refused,
    rl,
    sampler_of,
    sft,
    step,
    text,
    train,
    wait,
)
from tests.unit.backends.oracle import logprobs, peft_model, trainable

Formula = Callable[[np.ndarray, np.ndarray, np.ndarray], np.ndarray]


@pytest.fixture(scope="module")
def run(service: tinker.ServiceClient) -> tinker.TrainingClient:
    """Trained a little; the tests of this file only look at it."""
    run = new_run(service, seed=71)
    train(run, 2)
    return run


def test_a_mixed_batch_gives_each_datum_what_it_gets_alone(run: tinker.TrainingClient) -> None:
    """public-reports B16: lengths 3, 9, 17 in mixed order, the first half with weight zero."""
    batch = [
        sft(text(length, length + 1), [0.0] * (length // 2) + [1.0] * (length - length // 2))
        for length in (9, 3, 17, 3, 9)
    ]
    together = wait(run.forward(batch, "cross_entropy"))
    for index, datum in enumerate(batch):
        alone = wait(run.forward([datum], "cross_entropy"))
        length = datum.model_input.length
        assert output_logprobs(together, index).shape == (length,)
        assert_same(output_logprobs(together, index), output_logprobs(alone))
        elementwise = np.array(together.loss_fn_outputs[index]["elementwise_loss"].data)
        weights = np.array(datum.loss_fn_inputs["weights"].data)
        assert_same(elementwise, -output_logprobs(together, index) * weights)


def _clip(ratio: np.ndarray, low: float = 0.8, high: float = 1.2) -> np.ndarray:
    return np.clip(ratio, low, high)


LOSSES: dict[str, tuple[str, dict[str, Any] | None, Formula]] = {
    "importance_sampling": ("importance_sampling", None, lambda p, q, a: -np.exp(p - q) * a),
    "ppo": (
        "ppo",
        None,
        lambda p, q, a: -np.minimum(np.exp(p - q) * a, _clip(np.exp(p - q)) * a),
    ),
    "ppo with thresholds": (
        "ppo",
        {"clip_low_threshold": 0.9, "clip_high_threshold": 1.1},
        lambda p, q, a: -np.minimum(np.exp(p - q) * a, _clip(np.exp(p - q), 0.9, 1.1) * a),
    ),
    "cispo": (
        "cispo",
        {"clip_low_threshold": 0.8, "clip_high_threshold": 1.2},
        lambda p, q, a: -_clip(np.exp(p - q)) * p * a,
    ),
    "dro": (
        "dro",
        {"beta": 0.7},
        lambda p, q, a: -(p * a - 0.35 * (p - q) ** 2),
    ),
}


@pytest.mark.parametrize("kind", LOSSES)
def test_the_loss_is_the_documented_formula_summed_over_tokens(
    run: tinker.TrainingClient, kind: str
) -> None:
    """public-reports B19: forward says the loss that its logprobs imply; and so does
    forward_backward."""
    loss, config, formula = LOSSES[kind]
    rng = np.random.default_rng(3)
    batch, expected = [], 0.0
    for seed in (1, 2):
        tokens = text(seed, 12)
        now = fingerprint(run, tokens)
        old = now + rng.uniform(-0.5, 0.5, 11)
        advantages = rng.normal(size=11)
        batch.append(rl(tokens, old.tolist(), advantages.tolist()))
        expected += formula(now, old.astype(np.float32), advantages.astype(np.float32)).sum()
    for send in (run.forward, run.forward_backward):
        output = wait(send(batch, loss, config))  # type: ignore[arg-type]
        assert output.metrics["loss:sum"] == pytest.approx(expected, rel=1e-4, abs=1e-4)
        assert all(name.count(":") == 1 for name in output.metrics)
    wait(run.optim_step(adam(0.0)))


def test_cross_entropy_is_the_weighted_sum(run: tinker.TrainingClient) -> None:
    """public-reports B19"""
    weights = [0.0, 0.5, 2.0, 1.0, -1.0]
    output = wait(run.forward([sft(text(1, 6), weights)], "cross_entropy"))
    expected = -(output_logprobs(output) * weights).sum()
    assert output.metrics["loss:sum"] == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("sparse", [False, True])
def test_soft_targets_are_weighted_targets_at_one_position(
    run: tinker.TrainingClient, sparse: bool
) -> None:
    """[N, K] targets, dense (numpy) and sparse (torch, mostly zero)."""
    tokens, columns = text(5, 12), 8
    targets = np.zeros((12, columns), np.int64)
    weights = np.zeros((12, columns), np.float32)
    targets[:, 0], weights[:, 0] = text(6, 12), 0.75
    targets[3, 5], weights[3, 5] = 77, 0.25
    wrap = (lambda array: torch.tensor(array)) if sparse else types.TensorData.from_numpy
    datum = types.Datum(
        model_input=prompt(tokens),
        loss_fn_inputs={"target_tokens": wrap(targets), "weights": wrap(weights)},
    )
    output = wait(run.forward([datum], "cross_entropy"))
    got = np.array(output.loss_fn_outputs[0]["logprobs"].data).reshape(12, columns)
    single = types.Datum(
        model_input=prompt(tokens), loss_fn_inputs={"target_tokens": targets[:, 0].tolist()}
    )
    assert_same(got[:, 0], output_logprobs(wait(run.forward([single], "cross_entropy"))))
    expected = -(got * weights).sum()
    assert output.metrics["loss:sum"] == pytest.approx(expected, rel=1e-4)


@pytest.mark.parametrize("model", [MODEL, UNTIED])
def test_three_steps_are_those_of_peft_and_torch(
    service: tinker.ServiceClient,
    rest: tinker.RestClient,
    model_path: Path,
    untied_path: Path,
    tmp_path: Path,
    model: str,
) -> None:
    """Issue 2 item 5: AdamW with decay and clipping, from the same adapter, in float64."""
    run = new_run(service, base_model=model, rank=4, seed=72)
    start = wait(run.save_weights_external(fresh("start")))
    folder = download(rest, start.path, tmp_path / "start")
    peft = peft_model(model_path if model == MODEL else untied_path, folder)
    options = {"beta1": 0.9, "beta2": 0.95, "eps": 1e-8, "weight_decay": 0.1}
    optimizer = torch.optim.AdamW(
        list(trainable(peft).values()), lr=1e-3, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1
    )
    for number in range(3):
        batch = [sft(text(10 * number + i, 9 + i)) for i in range(3)]
        passed = run.forward_backward(batch, "cross_entropy")
        wait(run.optim_step(adam(1e-3, grad_clip_norm=1.0, **options)))
        loss = -sum(
            logprobs(
                peft,
                torch.tensor(datum.model_input.to_ints()),
                torch.tensor(datum.loss_fn_inputs["target_tokens"].data),
            ).sum()
            for datum in batch
        )
        assert isinstance(loss, torch.Tensor)
        loss.backward()
        assert wait(passed).metrics["loss:sum"] == pytest.approx(loss.item(), rel=1e-5)
        torch.nn.utils.clip_grad_norm_(list(trainable(peft).values()), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    ours = adapter_of(run, rest, tmp_path / "end")
    theirs = trainable(peft)
    for name, tensor in ours.items():
        other = theirs[name.removeprefix("base_model.model.")].detach()
        difference = (tensor.double() - other).norm() / other.norm()
        assert difference < 1e-4, (name, float(difference))


def test_the_learning_rate_is_heeded(service: tinker.ServiceClient) -> None:
    """public-reports B21: 0 moves nothing, and Adam's first step moves by the rate."""
    runs = {rate: new_run(service, seed=73) for rate in (0.0, 1e-3, 1e-2)}
    before = fingerprint(runs[0.0])
    moved = {}
    for rate, run in runs.items():
        step(run, learning_rate=rate)
        moved[rate] = np.abs(fingerprint(run) - before).mean()
    assert moved[0.0] == 0
    assert 3 < moved[1e-2] / moved[1e-3] < 30


def test_the_documented_defaults_are_used(service: tinker.ServiceClient) -> None:
    """Protocol 8.7: 1e-4, 0.9, 0.95, 1e-12, no decay, no clipping."""
    silent, explicit = new_run(service, seed=74), new_run(service, seed=74)
    params = types.AdamParams(
        learning_rate=1e-4, beta1=0.9, beta2=0.95, eps=1e-12, weight_decay=0.0, grad_clip_norm=0.0
    )
    for _ in range(2):
        for run, chosen in ((silent, types.AdamParams()), (explicit, params)):
            wait(run.forward_backward(DATA, "cross_entropy"))
            wait(run.optim_step(chosen))
    assert_same(fingerprint(silent), fingerprint(explicit), 1e-6)


def test_a_forward_leaves_no_gradient(service: tinker.ServiceClient) -> None:
    looked, alone = new_run(service, seed=75), new_run(service, seed=75)
    for run in (looked, alone):
        wait(run.forward_backward(DATA, "cross_entropy"))
    wait(looked.forward([sft(text(1))], "cross_entropy"))
    for run in (looked, alone):
        wait(run.optim_step(adam()))
    assert_same(fingerprint(looked), fingerprint(alone), 1e-6)


def test_gradients_add_up_until_the_step(service: tinker.ServiceClient) -> None:
    apart, together = new_run(service, seed=76), new_run(service, seed=76)
    batch = [sft(text(seed)) for seed in range(4)]
    for datum in batch:
        wait(apart.forward_backward([datum], "cross_entropy"))
    wait(together.forward_backward(batch, "cross_entropy"))
    norms = [wait(run.optim_step(adam())).metrics["grad_norm"] for run in (apart, together)]
    assert norms[0] == pytest.approx(norms[1], rel=1e-5)
    assert_same(fingerprint(apart), fingerprint(together))


def test_a_custom_loss_equals_the_built_in_one(service: tinker.ServiceClient) -> None:
    """Client-side custom losses need exact logprobs and signed weights."""
    custom, built_in = new_run(service, seed=77), new_run(service, seed=77)

    def negative_likelihood(
        data: list[types.Datum], per_datum: list[torch.Tensor]
    ) -> tuple[torch.Tensor, dict[str, float]]:
        loss = -torch.stack([row.sum() for row in per_datum]).sum()
        return loss, {"mine": loss.item()}

    output = wait(custom.forward_backward_custom(DATA, negative_likelihood))
    wait(custom.optim_step(adam()))
    step(built_in)
    assert output.metrics["loss:sum"] == pytest.approx(output.metrics["mine"], rel=1e-5)
    assert_same(fingerprint(custom), fingerprint(built_in), 1e-4)


def test_a_run_that_diverges_says_so_and_harms_nobody(service: tinker.ServiceClient) -> None:
    """A learning rate of 1e30 makes its weights useless: its own requests answer or are refused,
    none hangs, and a neighbour in the same passes computes as it does alone."""
    wild, tame, alone = (new_run(service, seed=seed) for seed in (78, 79, 79))
    step(wild, learning_rate=1e30)
    futures = {
        run: [
            future
            for _ in range(3)
            for future in (
                run.forward_backward(DATA, "cross_entropy"),
                run.optim_step(adam()),
            )
        ]
        for run in (wild, tame)
    }
    for future in futures[tame]:
        wait(future)
    for passed in futures[wild][::2]:
        with refused("nan"):
            wait(passed)
    for stepped in futures[wild][1::2]:
        assert wait(stepped).metrics["num_gradients"] == 0
    train(alone, 3)
    assert_same(fingerprint(tame), fingerprint(alone), 1e-5)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_samples_of_a_diverged_run_fail_alone(
    service: tinker.ServiceClient, temperature: float
) -> None:
    """Another tenant's sample in the same batch is finished as if nothing had been."""
    wild, tame = new_run(service, seed=78), new_run(service, seed=79)
    train(tame, 1)
    step(wild, learning_rate=1e30)
    good, broken = sampler_of(tame), sampler_of(wild)
    quiet = generate(good, PROBE, 200, temperature=0.0, stop=[]).tokens
    params = types.SamplingParams(max_tokens=200, temperature=0.0, stop=[])
    running = good.sample(prompt(PROBE), 1, params)
    params = types.SamplingParams(max_tokens=10, temperature=temperature, stop=[])
    failing = [broken.sample(prompt(PROBE), 1, params) for _ in range(5)]
    for sample in failing:
        with refused("nan"):
            wait(sample)
    assert wait(running).sequences[0].tokens == quiet
