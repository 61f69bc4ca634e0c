"""Custom losses in the packed pass: beside the requests of others, and never at their cost."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from backends.contract import CustomLoss, Failure, ForwardBackward, LossResult, OptimStep
from backends.losses.graph import limits
from backends.model import FrozenModel
from backends.training.local import local_trainer
from backends.training.trainer import Trainer
from tests.tiny_models import tiny_llama, with_tokenizer
from tests.unit.backends.material import run_all, sft, spec
from tests.unit.losses_graph.graphs import SUM, X, call, graph, method, ref

# As cross_entropy: -(logprobs * weights).sum()
NEG_LL = graph(
    call("product", "operator.mul", X, ref("weights")),
    method("total", "sum", ref("product")),
    call("loss", "operator.neg", ref("total")),
    inputs=(("logprobs", 1), ("weights", 1)),
)
TOO_LARGE = graph(method("wide", "repeat", X, 2**30), method("loss", "sum", ref("wide")))
NOT_ALLOWED = graph(call("bad", "torch.load", "/etc/passwd"), SUM)
UNDERIVABLE = graph(
    call("step", "torch.heaviside", X, X), method("loss", "sum", ref("step")), metrics={}
)
NAN_METRIC = graph(
    SUM,
    call("odd", "operator.truediv", ref("loss"), 0.0),
    call("nan", "operator.sub", ref("odd"), ref("odd")),
    metrics={"custom/odd:mean": ref("nan")},
)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> FrozenModel:
    path: Path = with_tokenizer(tiny_llama(tmp_path_factory.mktemp("llama")))
    return FrozenModel.load(path, torch.float32, torch.device("cpu"))


@pytest.fixture
def trainer(model: FrozenModel) -> Trainer:
    made = local_trainer(model, 4096)
    for run in ("a", "b"):
        made.create(run, spec(seed=1))
    return made


def custom(run: str, loss: CustomLoss, backward: bool = True) -> ForwardBackward:
    request = sft(run, [5, 9, 3], backward=backward)
    return replace(request, loss="custom", custom_loss=loss)


def step(trainer: Trainer, run: str) -> float:
    [result] = trainer.optim_step([OptimStep(run=run, learning_rate=1e-2)])
    assert not isinstance(result, Failure)
    [output] = run_all(trainer, [sft(run, [7], seed=50, backward=False)])
    assert isinstance(output, LossResult)
    return output.metrics["loss:sum"]


def test_it_trains_as_the_same_loss_that_is_built_in(trainer: Trainer) -> None:
    built_in, ours = run_all(trainer, [sft("a", [5, 9, 3]), custom("b", NEG_LL)])
    assert isinstance(built_in, LossResult)
    assert isinstance(ours, LossResult)
    assert ours.metrics == {"loss:sum": pytest.approx(built_in.metrics["loss:sum"], rel=1e-6)}
    assert [set(output) for output in ours.outputs] == [{"logprobs"}] * 3
    assert step(trainer, "a") == pytest.approx(step(trainer, "b"), abs=1e-5)


@pytest.mark.parametrize(
    ("loss", "words"),
    [
        (TOO_LARGE, ["datum 0", "'wide'"]),
        (NOT_ALLOWED, ["'bad'", "torch.load"]),
        (UNDERIVABLE, ["datum 0", "backward pass"]),
        (replace(NEG_LL, inputs=()), ["no inputs"]),
    ],
)
def test_one_that_is_refused_leaves_its_neighbour_alone(
    trainer: Trainer, loss: CustomLoss, words: list[str]
) -> None:
    failed, fine = run_all(trainer, [custom("a", loss), sft("b", [5, 9, 3])])
    assert isinstance(failed, Failure)
    assert failed.category == "user"
    assert all(word in failed.message for word in words), failed.message
    [alone] = run_all(trainer, [sft("b", [5, 9, 3], backward=False)])
    assert isinstance(fine, LossResult)
    assert isinstance(alone, LossResult)
    assert fine.metrics == pytest.approx(alone.metrics)


def test_no_gradient_is_kept_of_a_request_that_failed(trainer: Trainer) -> None:
    before = step(trainer, "a")
    run_all(trainer, [custom("a", TOO_LARGE), custom("a", NEG_LL, backward=False)])
    assert step(trainer, "a") == before


def test_a_metric_that_is_no_number_reaches_its_user(trainer: Trainer) -> None:
    [result] = run_all(trainer, [custom("a", NAN_METRIC)])
    assert isinstance(result, LossResult)
    assert np.isnan(result.metrics["custom/odd:mean"])


def test_a_graph_for_too_many_datums_is_refused(trainer: Trainer) -> None:
    many = graph(*(call(f"n{i}", "torch.exp", X) for i in range(900)), SUM)
    request = custom("a", many)
    request = replace(request, data=request.data[:1] * 600)
    [failed] = run_all(trainer, [request])
    assert isinstance(failed, Failure)
    assert "600 datums" in failed.message
    [failed] = run_all(trainer, [replace(request, data=request.data[:1], more=True, part_of=600)])
    assert isinstance(failed, Failure)
    assert "600 datums" in failed.message


def test_what_the_datums_share_does_not_depend_on_how_they_are_cut(
    trainer: Trainer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A replay may be cut in other places, and must not be refused what was computed once."""
    monkeypatch.setattr(limits, "REQUEST_WORK", 2**12)
    monkeypatch.setattr(limits, "WORK_PER_LOGPROB", 0)
    whole = custom("a", NEG_LL)
    alone = replace(whole, data=whole.data[:1])
    assert not isinstance(run_all(trainer, [alone])[0], Failure)
    many = replace(whole, data=whole.data[:1] * 4096)
    part = replace(alone, more=True, part_of=4096)
    for request in (many, part):
        [failed] = run_all(trainer, [request])
        assert isinstance(failed, Failure)
        assert "more computing" in failed.message
