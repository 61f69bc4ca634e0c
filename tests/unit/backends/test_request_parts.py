"""A request that comes in several parts is as one that comes whole."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from backends.contract import Failure, ForwardBackward, LossResult, OptimStep, Partial
from backends.training.trainer import CallRefusedError
from tests.tiny_models import VOCAB_SIZE
from tests.unit.backends.material import assert_close, gradient, run_all, run_good, sft, spec

LENGTHS = (9, 4, 12, 3, 5)


def _parts(request: ForwardBackward, cuts: set[int]) -> list[ForwardBackward]:
    total = len(request.data)
    edges = [0, *sorted(cuts), total]
    return [
        replace(request, data=request.data[first:last], more=last < total, part_of=total)
        for first, last in pairwise(edges)
    ]


def _send(trainer, parts: list[ForwardBackward]) -> LossResult | Failure:
    *before, last = parts
    for part in before:
        assert run_all(trainer, [part]) == [Partial()]
    (result,) = run_all(trainer, [last])
    assert not isinstance(result, Partial)
    return result


@given(cuts=st.sets(st.integers(1, len(LENGTHS) - 1)), backward=st.booleans())
@settings(
    max_examples=20, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
def test_any_split_gives_the_outputs_and_the_gradient_of_the_whole(
    new_trainer, llama_path, tmp_path, cuts, backward
):
    trainer, whole = new_trainer(llama_path), new_trainer(llama_path)
    for t in (trainer, whole):
        t.create("r", spec())
    request = sft("r", LENGTHS, seed=1, backward=backward)
    (expected,) = run_good(whole, request)
    got = _send(trainer, _parts(request, cuts))
    assert got.metrics == pytest.approx(expected.metrics, rel=1e-5)
    for a, b in zip(got.outputs, expected.outputs, strict=True):
        assert a.keys() == b.keys()
        for name in a:
            np.testing.assert_allclose(a[name], b[name], rtol=1e-5, atol=1e-5)
    assert_close(gradient(trainer, "r", tmp_path / "a"), gradient(whole, "r", tmp_path / "b"))


def test_the_parts_of_many_runs_go_together_with_whole_requests(
    trainer, new_trainer, llama_path, tmp_path
):
    whole = new_trainer(llama_path)
    requests = [sft(run, LENGTHS, seed=i) for i, run in enumerate("rst")]
    for t in (trainer, whole):
        for run in "rst":
            t.create(run, spec())
    first, second = zip(*(_parts(request, {2}) for request in requests[:2]), strict=True)
    assert run_all(trainer, [*first, requests[2]])[:2] == [Partial(), Partial()]
    after = sft("r", [6], seed=9)
    results = run_good(trainer, *second, after)
    for got, wanted in zip(results, run_good(whole, *requests[:2], after), strict=True):
        assert got.metrics == pytest.approx(wanted.metrics, rel=1e-5)
    run_good(whole, requests[2])
    for run in "rst":
        assert_close(gradient(trainer, run, tmp_path / "a"), gradient(whole, run, tmp_path / "b"))


def _spoiled(request: ForwardBackward, datum: int, name: str, value: float) -> ForwardBackward:
    inputs = dict(request.data[datum].loss_inputs)
    inputs[name] = inputs[name].copy()
    inputs[name][1] = value
    data = list(request.data)
    data[datum] = replace(data[datum], loss_inputs=inputs)
    return replace(request, data=tuple(data))


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [("weights", math.inf, "loss at position 1"), ("target_tokens", VOCAB_SIZE, "target_tokens")],
)
def test_a_failing_part_names_the_datum_of_the_whole_and_leaves_nothing(
    trainer, tmp_path, name, value, words
):
    trainer.create("r", spec())
    first, second, _ = _parts(_spoiled(sft("r", LENGTHS), 3, name, value), {2, 4})
    assert run_all(trainer, [first]) == [Partial()]
    (failure,) = run_all(trainer, [second])
    assert isinstance(failure, Failure)
    assert failure.message.startswith("datum 3: ")
    assert words in failure.message
    assert gradient(trainer, "r", tmp_path / "a") == {}
    (alone,) = run_good(trainer, sft("r", [5], seed=7))
    assert len(alone.outputs) == 1


def test_a_step_and_a_snapshot_between_parts_do_not_see_them(trainer, tmp_path):
    trainer.create("r", spec())
    first, second = _parts(sft("r", LENGTHS), {3})
    run_all(trainer, [first])
    assert gradient(trainer, "r", tmp_path / "a") == {}
    (result,) = trainer.optim_step([OptimStep(run="r")])
    assert result.metrics["num_gradients"] == 0
    run_good(trainer, second)
    (result,) = trainer.optim_step([OptimStep(run="r")])
    assert result.metrics["num_gradients"] == 1


@pytest.mark.parametrize("end", ["create", "load", "unload", "given up"])
def test_what_ends_a_run_or_its_pass_ends_the_request_under_way(
    llama_path, new_trainer, tmp_path, end
):
    trainer = new_trainer(llama_path, max_tokens=8)
    trainer.create("r", spec())
    trainer.save("r", tmp_path / "saved", "adapter")
    first, second, _ = _parts(sft("r", LENGTHS), {1, 4})
    run_all(trainer, [first])
    if end == "load":
        trainer.load("r", tmp_path / "saved", "adapter")
    elif end == "given up":
        generator = trainer.forward_backward([second])
        next(generator)
        generator.close()
    else:
        trainer.unload("r")
        trainer.create("r", spec())
    (alone,) = run_good(trainer, sft("r", [5], seed=7))
    assert len(alone.outputs) == 1


def test_nothing_of_a_run_may_follow_a_part_in_one_call(trainer, tmp_path):
    trainer.create("r", spec())
    first, second = _parts(sft("r", LENGTHS), {3})
    with pytest.raises(CallRefusedError, match="follows a part"):
        run_all(trainer, [first, second])
    assert gradient(trainer, "r", tmp_path / "a") == {}
