"""Requests with and without a gradient, of different losses, in one microbatch."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from backends.contract import ForwardBackward, LossResult
from tests.unit.backends.material import (
    assert_close,
    gradient,
    run_all,
    run_good,
    sft,
    spec,
    start_trained,
)
from tests.unit.losses_graph.graphs import X, call, graph, method, ref

SPECS = {"trained": spec(rank=3, seed=1), "asked": spec(rank=8, seed=2, groups="attn unembed")}


@pytest.fixture
def start(load_model, new_trainer, model_path, tmp_path):
    """Trainers whose runs have adapters that do something."""

    def made():
        trainer = new_trainer(model_path)
        for run, run_spec in SPECS.items():
            start_trained(trainer, load_model(model_path), run, run_spec, tmp_path / run)
        return trainer

    return made


def _policy_gradient(run: str, length: int, backward: bool) -> ForwardBackward:
    """A request of one datum."""
    request = sft(run, [length], seed=7, backward=backward)
    rng = np.random.default_rng(7)
    inputs = {
        "target_tokens": request.data[0].loss_inputs["target_tokens"],
        "logprobs": rng.normal(-5, 1, length).astype(np.float32),
        "advantages": rng.normal(0, 1, length).astype(np.float32),
    }
    data = (replace(request.data[0], loss_inputs=inputs),)
    return replace(request, data=data, loss="importance_sampling")


def _assert_same(got: LossResult, expected: LossResult) -> None:
    assert got.metrics == pytest.approx(expected.metrics, rel=1e-5)
    for ours, theirs in zip(got.outputs, expected.outputs, strict=True):
        assert ours.keys() == theirs.keys()
        for name in theirs:
            np.testing.assert_allclose(ours[name], theirs[name], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("first", ["forward", "backward"])
def test_a_forward_and_a_backward_of_other_losses_give_what_each_gives_alone(
    start, tmp_path, first
):
    together, alone = start(), start()
    requests = [_policy_gradient("asked", 9, backward=False), sft("trained", [7, 30], seed=2)]
    if first == "backward":
        requests.reverse()
    alone_results = [run_good(alone, request)[0] for request in requests]
    for got, expected in zip(run_good(together, *requests), alone_results, strict=True):
        _assert_same(got, expected)
    assert gradient(together, "asked", tmp_path / "a") == {}
    assert_close(
        gradient(together, "trained", tmp_path / "b"), gradient(alone, "trained", tmp_path / "c")
    )


def test_they_share_one_pass_over_the_weights(start):
    requests = [_policy_gradient("asked", 9, backward=False), sft("trained", [7, 30], seed=2)]
    assert sum(1 for _ in start().forward_backward(requests)) == 0
    much = replace(requests[0], data=requests[0].data * 2)
    assert sum(1 for _ in start().forward_backward([much, requests[1]])) == 1


def test_a_run_may_be_asked_and_trained_at_once(start, tmp_path):
    together, alone = start(), start()
    requests = [sft("trained", [20], seed=1), _policy_gradient("trained", 9, backward=False)]
    results = run_good(together, *requests)
    for got, request in zip(results, requests, strict=True):
        _assert_same(got, run_good(alone, request)[0])
    assert_close(
        gradient(together, "trained", tmp_path / "a"), gradient(alone, "trained", tmp_path / "b")
    )


def test_a_backward_that_fails_leaves_the_forward_beside_it_well(start, tmp_path):
    trainer = start()
    failing = sft("trained", [6], seed=3)
    weights = np.full(6, np.inf, np.float32)
    inputs = failing.data[0].loss_inputs | {"weights": weights}
    failing = replace(failing, data=(replace(failing.data[0], loss_inputs=inputs),))
    forward = _policy_gradient("asked", 9, backward=False)
    failure, got = run_all(trainer, [failing, forward])
    assert not isinstance(failure, LossResult)
    _assert_same(got, run_good(start(), forward)[0])
    assert gradient(trainer, "trained", tmp_path / "a") == {}


def test_a_forward_needs_no_gradient_of_its_loss_whoever_is_beside_it(start):
    """The gradient of this custom loss is infinite, which would refuse a backward."""
    infinite = graph(
        call("zero", "operator.mul", X, 0.0),
        call("root", "torch.sqrt", ref("zero")),
        method("loss", "sum", ref("root")),
    )
    forward = replace(sft("asked", [5], backward=False), loss="custom", custom_loss=infinite)
    [alone] = run_good(start(), forward)
    beside, _ = run_good(start(), forward, sft("trained", [7]))
    _assert_same(beside, alone)
