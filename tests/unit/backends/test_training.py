"""The local trainer against peft + torch.optim, and against itself alone."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
import torch

from backends.contract import Failure, OptimStep, RunMemory, StepResult
from backends.lora.parts import Part
from backends.training.local import local_trainer
from tests.tiny_models import MAX_CONTEXT_LENGTH, VOCAB_SIZE
from tests.unit.backends.material import (
    assert_close,
    gradient,
    run_all,
    run_good,
    sft,
    sft_datum,
    spec,
    start_trained,
    weights,
)
from tests.unit.backends.oracle import logprobs, peft_model, trainable

SPECS = {
    "a": spec(rank=3, seed=1),
    "b": spec(rank=8, seed=2, groups="attn unembed"),
    "c": spec(rank=1, seed=3, groups="mlp"),
}
STEP = OptimStep(run="r", learning_rate=1e-2)
HYPER = OptimStep(
    run="r",
    learning_rate=3e-3,
    beta1=0.8,
    beta2=0.99,
    # Well above float32 rounding in a gradient clipped to norm 10: where an entry happens to be
    # as small as eps, its last bits would show in the step.
    eps=1e-3,
    weight_decay=0.1,
    grad_clip_norm=10.0,
)


def _step(trainer, *runs: str, hyper: OptimStep = STEP) -> list[dict[str, float]]:
    results = trainer.optim_step([replace(hyper, run=run) for run in runs])
    assert all(isinstance(result, StepResult) for result in results)
    return [result.metrics for result in results]


@pytest.mark.parametrize("hyper", [STEP, HYPER], ids=["plain", "decay, betas and clipping"])
def test_three_sft_steps_end_where_peft_and_torch_end(
    model_path, load_model, new_trainer, tmp_path, hyper
):
    trainer = new_trainer(model_path, 30)
    folder = start_trained(trainer, load_model(model_path), "r", spec(), tmp_path / "start")
    reference = peft_model(model_path, folder)
    parameters = trainable(reference)
    optimizer = torch.optim.AdamW(
        parameters.values(),
        lr=hyper.learning_rate,
        betas=(hyper.beta1, hyper.beta2),
        eps=hyper.eps,
        weight_decay=hyper.weight_decay,
    )
    for step in range(3):
        request = sft("r", [12, 7, 20], seed=10 * step)
        run_good(trainer, request)
        for datum in request.data:
            tokens, targets, w = (
                torch.from_numpy(v)
                for v in (
                    datum.tokens,
                    datum.loss_inputs["target_tokens"],
                    datum.loss_inputs["weights"],
                )
            )
            (-logprobs(reference, tokens, targets) * w.double()).sum().backward()
        limit = hyper.grad_clip_norm or math.inf
        norm = torch.nn.utils.clip_grad_norm_(parameters.values(), limit)
        optimizer.step()
        optimizer.zero_grad()
        (metrics,) = _step(trainer, "r", hyper=hyper)
        assert metrics["grad_norm"] == pytest.approx(norm.item(), rel=1e-4)
        assert norm > 20  # clipping at 10 does something
    assert_close(weights(trainer, "r", tmp_path / "end"), parameters, relative=1e-5)


def test_tenants_together_get_what_they_get_alone(model_path, load_model, new_trainer, tmp_path):
    model = load_model(model_path)
    together, alone = new_trainer(model_path, 40), new_trainer(model_path, 40)
    for trainer in (together, alone):
        for run, run_spec in SPECS.items():
            start_trained(trainer, model, run, run_spec, tmp_path / run)
    for step in range(3):
        requests = [sft(run, [9, 15, 4], seed=step * 100 + i * 10) for i, run in enumerate(SPECS)]
        results = run_good(together, *requests)
        _step(together, *SPECS)
        for request, result in zip(requests, results, strict=True):
            (expected,) = run_good(alone, request)
            _step(alone, request.run)
            assert result.metrics == pytest.approx(expected.metrics, rel=1e-5)
            for got, wanted in zip(result.outputs, expected.outputs, strict=True):
                np.testing.assert_allclose(got["logprobs"], wanted["logprobs"], atol=1e-5)
    for run in SPECS:
        assert_close(
            weights(together, run, tmp_path / "t"), weights(alone, run, tmp_path / "s"), 1e-5
        )


def test_requests_of_one_run_in_one_pass_are_as_consecutive_ones(
    trainer, new_trainer, llama_path, tmp_path
):
    consecutive = new_trainer(llama_path)
    requests = [sft("r", [9, 4], seed=1), sft("r", [6], seed=2), sft("r", [6], 3, backward=False)]
    for t in (trainer, consecutive):
        t.create("r", spec())
    results = run_good(trainer, *requests)
    expected = [run_good(consecutive, request)[0] for request in requests]
    for got, wanted in zip(results, expected, strict=True):
        assert got.metrics == pytest.approx(wanted.metrics, rel=1e-5)
    assert_close(gradient(trainer, "r", tmp_path / "a"), gradient(consecutive, "r", tmp_path / "b"))
    assert _step(trainer, "r")[0]["num_gradients"] == 2


def test_cutting_into_microbatches_changes_nothing(new_trainer, llama_path, tmp_path):
    small, large = new_trainer(llama_path, 10), new_trainer(llama_path, 1000)
    requests = [sft("r", [9, 4, 12, 3], seed=1), sft("s", [5, 5], seed=2)]
    pauses = []
    for t in (small, large):
        for run in "rs":
            t.create(run, spec())
        pauses.append(sum(1 for _ in t.forward_backward(requests)))
    assert pauses == [4, 0]
    for run in "rs":
        assert_close(gradient(small, run, tmp_path / "a"), gradient(large, run, tmp_path / "b"))


def _poisoned(request, datum: int, position: int):
    data = list(request.data)
    spoiled = data[datum].loss_inputs["weights"].copy()
    spoiled[position] = math.inf
    inputs = data[datum].loss_inputs | {"weights": spoiled}
    data[datum] = replace(data[datum], loss_inputs=inputs)
    return replace(request, data=tuple(data))


@pytest.mark.parametrize("max_tokens", [12, 4096])
def test_a_failing_request_fails_alone(new_trainer, llama_path, tmp_path, max_tokens):
    trainer, clean = new_trainer(llama_path, max_tokens), new_trainer(llama_path, max_tokens)
    for t in (trainer, clean):
        for run in "rs":
            t.create(run, spec())
    good = [sft("r", [9, 4], seed=1), sft("s", [7], seed=2)]
    bad = _poisoned(sft("r", [5, 6, 5], seed=3), datum=1, position=4)
    first, failure, second = run_all(trainer, [good[0], bad, good[1]])
    assert failure == Failure(
        message="datum 1: the loss at position 4 is inf; the request's gradient is dropped",
        category="user",
    )
    expected = run_good(clean, *good)
    for got, wanted in zip((first, second), expected, strict=True):
        assert got.metrics == pytest.approx(wanted.metrics, rel=1e-5)
    for run in "rs":
        assert_close(gradient(trainer, run, tmp_path / "a"), gradient(clean, run, tmp_path / "b"))


@pytest.mark.parametrize("checkpointing", ["off", "on"])
def test_a_crowd_of_one_shape_is_as_each_alone_and_one_that_fails_takes_none_with_it(
    load_model, llama_path, tmp_path, checkpointing
):
    """Their low-rank products are stacked; each datum is 9 tokens, in two microbatches."""
    model = load_model(llama_path)
    runs = [f"r{i}" for i in range(7)]
    crowd = local_trainer(model, 40, activation_checkpointing=checkpointing)
    alone = local_trainer(model, 40, activation_checkpointing="off")
    for i, run in enumerate(runs):
        for t in (crowd, alone):
            start_trained(t, model, run, spec(rank=4, seed=i), tmp_path / run)
    requests = [sft(run, [9], seed=i) for i, run in enumerate(runs)]
    requests[2] = _poisoned(requests[2], datum=0, position=5)
    results = run_all(crowd, requests)
    for i, (request, got) in enumerate(zip(requests, results, strict=True)):
        (wanted,) = run_all(alone, [request])
        assert isinstance(got, Failure) == isinstance(wanted, Failure) == (i == 2)
        if not isinstance(got, Failure):
            assert got.metrics == pytest.approx(wanted.metrics, rel=1e-5)
    _step(crowd, *runs)
    for run in runs:
        _step(alone, run)
        assert_close(
            weights(crowd, run, tmp_path / "a"), weights(alone, run, tmp_path / "b"), relative=1e-5
        )


def test_memory_is_what_the_numbers_of_each_run_take(trainer, llama_path, load_model):
    model = load_model(llama_path)
    trainer.create("r", spec(rank=4))
    trainer.create("s", spec(rank=2, groups="attn"))
    sizes = {
        run: 4 * rank * sum(t.in_features + t.out_features for t in model.targets if t.group in of)
        for run, rank, of in (("r", 4, "attn mlp unembed"), ("s", 2, "attn"))
    }
    report = trainer.memory()
    assert report.base_model == 4 * model.num_parameters
    for run, size in sizes.items():
        assert report.runs[run] == RunMemory(weights=size, moments=0, gradient=0, on_device=True)
    run_good(trainer, sft("r", [5]))
    assert trainer.memory().runs["r"].gradient == sizes["r"]
    _step(trainer, "r", "s")
    after = trainer.memory().runs
    assert (after["r"].moments, after["r"].gradient) == (2 * sizes["r"], 0)
    assert after["r"].total == 3 * sizes["r"]
    assert after["s"].moments == 0


def test_a_finite_loss_with_an_infinite_gradient_leaves_none(trainer, tmp_path):
    trainer.create("r", spec())
    request = sft("r", [5], seed=1)
    inputs = request.data[0].loss_inputs | {"weights": np.full(5, 3e37, np.float32)}
    request = replace(request, data=(replace(request.data[0], loss_inputs=inputs),))
    (failure,) = run_all(trainer, [request])
    assert isinstance(failure, Failure)
    assert failure.category == "user"
    assert gradient(trainer, "r", tmp_path / "a") == {}


REFUSED = {
    "token outside the vocabulary": lambda d: replace(d, tokens=d.tokens + VOCAB_SIZE),
    "negative target": lambda d: replace(
        d, loss_inputs=d.loss_inputs | {"target_tokens": d.tokens - VOCAB_SIZE}
    ),
    "too long": lambda d: sft_datum(MAX_CONTEXT_LENGTH + 1, 0),
    "empty": lambda d: sft_datum(0, 0),
    "short weights": lambda d: replace(
        d, loss_inputs=d.loss_inputs | {"weights": d.loss_inputs["weights"][1:]}
    ),
    "no targets": lambda d: replace(d, loss_inputs={}),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_refused_request_names_the_datum_and_leaves_no_gradient(trainer, tmp_path, name):
    trainer.create("r", spec())
    request = sft("r", [5, 6])
    data = (request.data[0], REFUSED[name](request.data[1]))
    refused, accepted = run_all(
        trainer, [replace(request, data=data), replace(request, backward=False)]
    )
    assert isinstance(refused, Failure)
    assert refused.category == "user"
    assert refused.message.startswith("datum 1: ")
    assert not isinstance(accepted, Failure)
    assert gradient(trainer, "r", tmp_path / "a") == {}


def test_unknown_runs_fail_alone(trainer):
    trainer.create("r", spec())
    unknown, known = run_all(trainer, [sft("x", [4]), sft("r", [4])])
    assert unknown == Failure(message="run x is not loaded", category="server")
    assert not isinstance(known, Failure)
    unknown, known = trainer.optim_step([OptimStep(run="x"), OptimStep(run="r")])
    assert isinstance(unknown, Failure)
    assert isinstance(known, StepResult)


def test_a_pass_given_up_half_way_leaves_no_gradient(new_trainer, llama_path, tmp_path):
    trainer = new_trainer(llama_path, 10)
    trainer.create("r", spec())
    generator = trainer.forward_backward([sft("r", [9, 9, 9])])
    next(generator)
    generator.close()
    assert gradient(trainer, "r", tmp_path / "a") == {}


def test_forward_alone_gives_the_same_numbers_and_no_gradient(trainer, tmp_path):
    trainer.create("r", spec())
    request = sft("r", [8, 5])
    (forward,) = run_good(trainer, replace(request, backward=False))
    assert gradient(trainer, "r", tmp_path / "a") == {}
    (both,) = run_good(trainer, request)
    assert forward.metrics == both.metrics
    for a, b in zip(forward.outputs, both.outputs, strict=True):
        assert np.array_equal(a["logprobs"], b["logprobs"])


def test_a_step_without_gradient_changes_nothing_and_says_so(trainer, tmp_path):
    trainer.create("r", spec())
    run_good(trainer, sft("r", [8]))
    _step(trainer, "r")
    before = weights(trainer, "r", tmp_path / "a")
    (metrics,) = _step(trainer, "r", hyper=HYPER)
    assert metrics == {"grad_norm": 0.0, "num_gradients": 0.0, "step": 1.0}
    after = weights(trainer, "r", tmp_path / "b")
    assert all(torch.equal(before[name], after[name]) for name in before)


def test_a_gradient_too_large_to_square_waits_for_a_step_that_clips_it(trainer, tmp_path):
    trainer.create("r", spec())
    request = sft("r", [5], seed=1)
    inputs = request.data[0].loss_inputs | {"weights": np.full(5, 1e19, np.float32)}
    run_good(trainer, replace(request, data=(replace(request.data[0], loss_inputs=inputs),)))
    before = weights(trainer, "r", tmp_path / "a")
    (failure,) = trainer.optim_step([STEP])
    assert isinstance(failure, Failure)
    assert failure.category == "user"
    after = weights(trainer, "r", tmp_path / "b")
    assert all(torch.equal(before[name], after[name]) for name in before)


def test_training_never_moves_the_base_model_even_where_head_and_embedding_are_one(
    load_model, new_trainer, model_path
):
    model = load_model(model_path)
    before = {n: p.clone() for n, p in model._model.named_parameters()}
    trainer = new_trainer(model_path)
    trainer.create("r", spec(groups="unembed attn"))
    for seed in range(2):
        run_good(trainer, sft("r", [10], seed))
        _step(trainer, "r")
    assert all(torch.equal(before[n], p) for n, p in model._model.named_parameters())
    assert all(p.grad is None for p in model._model.parameters())


def test_the_same_seed_gives_the_same_run_to_the_last_bit(new_trainer, llama_path, tmp_path):
    ends = []
    for seed in (5, 5, 6):
        trainer = new_trainer(llama_path)
        trainer.create("r", spec(seed=seed))
        run_good(trainer, sft("r", [10, 6]))
        _step(trainer, "r")
        ends.append(weights(trainer, "r", tmp_path / "end"))
    assert all(torch.equal(ends[0][name], ends[1][name]) for name in ends[0])
    assert not all(torch.equal(ends[0][name], ends[2][name]) for name in ends[0])


def test_bfloat16_base_trains_float32_adapters(new_trainer, model_path, tmp_path):
    trainer = new_trainer(model_path, dtype=torch.bfloat16)
    exact = new_trainer(model_path)
    losses = []
    for t in (trainer, exact):
        t.create("r", spec())
        (result,) = run_good(t, sft("r", [20, 10]))
        losses.append(result.metrics["loss:sum"])
    assert losses[0] == pytest.approx(losses[1], rel=0.03)
    rough, fine = (gradient(t, "r", tmp_path / "g") for t in (trainer, exact))
    assert all(tensor.dtype == torch.float32 for tensor in rough.values())
    rough_b, fine_b = (
        torch.cat([g[n].flatten() for n in g if "lora_B" in n]) for g in (rough, fine)
    )
    assert torch.cosine_similarity(rough_b, fine_b, dim=0) > 0.99
    for _ in range(20):
        _step(trainer, "r")
        (result,) = run_good(trainer, sft("r", [20, 10]))
    assert result.metrics["loss:sum"] < 0.8 * losses[0]


class _SmallMemory:
    """Stands before a model and runs out of memory over rows longer than it allows."""

    def __init__(self, model, max_tokens: int, message: str | None) -> None:
        self._model, self._max, self._message = model, max_tokens, message

    def __getattr__(self, name: str):
        return getattr(self._model, name)

    def hidden(self, tokens, *args, **options):
        if len(tokens) > self._max:
            if self._message is None:
                raise torch.OutOfMemoryError("CUDA out of memory")
            raise RuntimeError(self._message)
        return self._model.hidden(tokens, *args, **options)


CPU_WORDS = "DefaultCPUAllocator: can't allocate memory: you tried to allocate 7 bytes"


@pytest.mark.parametrize("message", [None, CPU_WORDS])
def test_out_of_memory_fails_only_what_cannot_fit_alone(
    load_model, new_trainer, llama_path, tmp_path, message
):
    clean, trainer = new_trainer(llama_path), new_trainer(llama_path)
    trainer._run_pass._model = _SmallMemory(load_model(llama_path), 12, message)
    for t in (clean, trainer):
        for run in "rst":
            t.create(run, spec())
    requests = [sft("r", [9, 8, 3], 1), sft("s", [4, 13], 2), sft("t", [5], 3)]
    results = run_all(trainer, requests)
    assert results[1] == Failure(
        message="datum 1: its 13 tokens do not fit in memory", category="server"
    )
    expected = run_good(clean, requests[0], requests[2])
    for got, wanted in zip((results[0], results[2]), expected, strict=True):
        assert got.metrics == pytest.approx(wanted.metrics, rel=1e-5)
    for run in "rst":
        assert_close(gradient(trainer, run, tmp_path / "a"), gradient(clean, run, tmp_path / "b"))


def test_memory_that_runs_out_in_the_middle_of_a_backward_leaves_nothing_half_added(
    new_trainer, llama_path, tmp_path, monkeypatch
):
    clean, trainer = new_trainer(llama_path), new_trainer(llama_path)
    requests = [sft(run, [6, 5], seed=i) for i, run in enumerate("rst")]
    for t in (clean, trainer):
        for run in "rst":
            t.create(run, spec())
    expected = run_good(clean, *requests)
    add_gradient, calls = Part.add_gradient, iter(range(10**6))

    def interrupted(*args) -> None:
        add_gradient(*args)
        if next(calls) == 7:
            raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(Part, "add_gradient", interrupted)
    for got, wanted in zip(run_good(trainer, *requests), expected, strict=True):
        assert got.metrics == pytest.approx(wanted.metrics, rel=1e-5)
    assert next(calls) > 8
    for run in "rst":
        assert_close(gradient(trainer, run, tmp_path / "a"), gradient(clean, run, tmp_path / "b"))


def test_where_room_can_be_made_nothing_is_cut(load_model, new_trainer, llama_path, tmp_path):
    clean, trainer = new_trainer(llama_path), new_trainer(llama_path)
    small = trainer._run_pass._model = _SmallMemory(load_model(llama_path), 12, None)
    asked = []

    def make_room(runs: set[str]) -> bool:
        asked.append(runs)
        small._max = 30
        return len(asked) == 1

    trainer._slots.make_room = make_room
    for t in (clean, trainer):
        t.create("r", spec())
    request = sft("r", [20, 5])
    (got,), (wanted,) = run_good(trainer, request), run_good(clean, request)
    assert asked == [{"r"}]
    assert got.metrics == wanted.metrics
    assert_close(gradient(trainer, "r", tmp_path / "a"), gradient(clean, "r", tmp_path / "b"))


def test_other_runtime_errors_are_not_taken_for_lack_of_memory(load_model, trainer, llama_path):
    trainer.create("r", spec())
    trainer._run_pass._model = _SmallMemory(load_model(llama_path), 1, "shapes do not match")
    with pytest.raises(RuntimeError, match="shapes"):
        run_all(trainer, [sft("r", [5])])


def test_info_says_what_the_service_must_know(trainer):
    info = trainer.info()
    assert (info.vocab_size, info.max_context_length) == (VOCAB_SIZE, MAX_CONTEXT_LENGTH)
    assert info.trainable_groups == ("attn", "mlp", "unembed")
    assert (info.dtype, info.device, info.eos_token_ids) == ("float32", "cpu", (255,))
    assert info.losses["cross_entropy"].many_targets
