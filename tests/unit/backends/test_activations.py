"""Activation checkpointing: the same numbers from less memory, chosen by what memory there is."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from backends.batching.attention import packed_attention
from backends.contract import Failure
from backends.lora.adapter import fresh_adapter
from backends.training import activations
from backends.training.activations import bytes_per_token, saved_bytes, too_large
from backends.training.local import local_trainer
from backends.training.trainer import Trainer
from tests.unit.backends.material import (
    assert_close,
    gradient,
    run_all,
    run_good,
    sft,
    spec,
    start_trained,
)

HIDDEN_SIZE, LAYERS = 64, 2
"""Of the tiny models."""
RUNS = {"r": spec(rank=3, seed=1), "s": spec(rank=8, seed=2, groups="attn unembed")}


@pytest.fixture
def start(load_model, model_path, tmp_path):
    def made(checkpointing: activations.Checkpointing) -> Trainer:
        model = load_model(model_path)
        trainer = local_trainer(model, 4096, checkpointing)
        for run, run_spec in RUNS.items():
            start_trained(trainer, model, run, run_spec, tmp_path / run)
        return trainer

    return made


class _Watched:
    """Stands before a model, notes how each row was run, and has too little memory for some."""

    def __init__(self, model, max_kept: int = 2**60, max_recomputed: int = 2**60) -> None:
        self._model = model
        self._max = {False: max_kept, True: max_recomputed}
        self.tried: list[tuple[int, bool]] = []
        """(tokens, whether layers were recomputed)"""

    def __getattr__(self, name: str):
        return getattr(self._model, name)

    def hidden(self, tokens, *args, recompute: bool):
        self.tried.append((len(tokens), recompute))
        if len(tokens) > self._max[recompute]:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return self._model.hidden(tokens, *args, recompute=recompute)


def _watch(trainer: Trainer, **limits: int) -> _Watched:
    passes = trainer._run_pass
    passes._model = _Watched(passes._model, **limits)
    return passes._model


def test_layers_that_are_computed_again_give_the_same_numbers_and_gradients(start, tmp_path):
    kept, recomputed = start("off"), start("on")
    watched = _watch(recomputed)
    requests = [sft("r", [9, 20, 9], seed=1), sft("s", [4, 31], seed=2)]
    expected = run_good(kept, *requests)
    for got, wanted in zip(run_good(recomputed, *requests), expected, strict=True):
        assert got.metrics == pytest.approx(wanted.metrics, rel=1e-6)
        for ours, theirs in zip(got.outputs, wanted.outputs, strict=True):
            np.testing.assert_allclose(ours["logprobs"], theirs["logprobs"], rtol=1e-6)
    assert watched.tried == [(73, True)]
    for run in RUNS:
        ours, theirs = gradient(recomputed, run, tmp_path), gradient(kept, run, tmp_path)
        assert_close(ours, theirs, relative=1e-6)


def test_another_pass_before_the_backward_does_not_change_what_is_computed_again(
    load_model, model_path
):
    """As when a sample is made in between: its adapters are the current ones by then."""
    model = load_model(model_path)

    def rows(recompute: bool, between: bool) -> torch.Tensor:
        parts = _parts(model, 12)
        hidden = _hidden(model, 12, parts, recompute)
        if between:
            with torch.no_grad():
                _hidden(model, 5, _parts(model, 5), recompute=False)
        hidden.square().sum().backward()
        [[flat]] = [part.take_gradients() for part in parts]
        return flat

    torch.testing.assert_close(rows(True, between=True), rows(False, between=False))


def _parts(model, num_tokens: int):
    adapter = fresh_adapter(spec(), model.targets, model.device)
    owner = activations.Owner(0, num_tokens, adapter, backward=True)
    return activations.arranged([owner], model.dtype)


def _hidden(model, num_tokens: int, parts, recompute: bool) -> torch.Tensor:
    tokens = torch.arange(num_tokens)
    plan = packed_attention([num_tokens], model.device, model.dtype)
    return model.hidden(tokens, tokens, parts, plan, recompute=recompute)


def test_saved_memory_is_counted_once_and_only_what_backward_wants():
    x, y = torch.ones(1000, requires_grad=True), torch.ones(1000, requires_grad=True)
    assert saved_bytes(lambda: x + y) == 0
    assert saved_bytes(lambda: x * y) == 8000
    assert saved_bytes(lambda: x * x * x) == 8000  # x, and x * x
    assert saved_bytes(lambda: x.exp()) == 4000  # its own result


def test_the_inputs_of_the_layers_are_all_that_is_kept(load_model, model_path):
    model = load_model(model_path)
    adapter = fresh_adapter(spec(), model.targets, model.device)
    kept = bytes_per_token(model, adapter)
    recomputed = bytes_per_token(model, adapter, recompute=True)
    row = 4 * HIDDEN_SIZE
    # Besides, the last norm keeps a row or two, and a scale.
    assert LAYERS * row <= recomputed <= (LAYERS + 2) * row + 64
    # Of each layer at least the inputs of q, k, v (one), o, gate and up (one), and down (double).
    assert kept - recomputed >= LAYERS * 5 * row - LAYERS * row


def test_the_measure_of_a_few_tokens_holds_for_many(load_model, model_path):
    model = load_model(model_path)
    adapter = fresh_adapter(spec(), model.targets, model.device)
    per_token = bytes_per_token(model, adapter)
    short, long = (
        saved_bytes(lambda n=n: _hidden(model, n, _parts(model, n), recompute=False))
        for n in (16, 216)
    )
    assert long - short == pytest.approx(200 * per_token, rel=1e-3)


@given(st.integers(0, 2**40), st.integers(0, 2**40))
def test_more_than_half_of_the_free_memory_is_too_large(needed, free):
    assert too_large(needed, free) == (2 * needed > free)


@pytest.mark.parametrize(
    ("checkpointing", "microbatches_free", "expected"),
    [
        ("auto", 2.1, False),
        ("auto", 1.9, True),
        ("off", 0, False),
        ("on", 2**60, True),
    ],
)
def test_layers_are_recomputed_when_their_activations_pass_half_of_what_is_free(
    start, monkeypatch, checkpointing, microbatches_free, expected
):
    trainer = start(checkpointing)
    run_state = trainer._runs["r"]
    size = 40 * bytes_per_token(trainer._model, run_state.adapter)
    monkeypatch.setattr(activations, "free_bytes", lambda device: size * microbatches_free)
    watched = _watch(trainer)
    run_good(trainer, sft("r", [30, 10]))
    assert watched.tried == [(40, expected)]


def test_a_forward_keeps_nothing_and_so_recomputes_nothing(start):
    trainer = start("on")
    watched = _watch(trainer)
    run_good(trainer, sft("r", [30], backward=False))
    assert watched.tried == [(30, False)]


def test_out_of_memory_first_keeps_less_then_cuts(start, tmp_path):
    clean, trainer = start("off"), start("auto")
    watched = _watch(trainer, max_kept=10, max_recomputed=20)
    requests = [sft("r", [8, 9], seed=1), sft("s", [6, 21], seed=2)]
    good, failure = run_all(trainer, requests)
    assert watched.tried == [
        (44, False),
        (44, True),
        *((17, False), (17, True)),  # r
        *((27, False), (27, True)),  # s
        (6, False),
        *((21, False), (21, True)),
    ]
    assert failure == Failure(
        message="datum 1: its 21 tokens do not fit in memory", category="server"
    )
    assert good.metrics == pytest.approx(run_good(clean, requests[0])[0].metrics, rel=1e-5)
    assert_close(gradient(trainer, "r", tmp_path / "a"), gradient(clean, "r", tmp_path / "b"))
    assert gradient(trainer, "s", tmp_path / "c") == {}


def test_who_turned_it_off_gets_smaller_microbatches_instead(start):
    trainer = start("off")
    watched = _watch(trainer, max_kept=10)
    run_good(trainer, sft("r", [8, 9]))
    assert watched.tried == [(17, False), (8, False), (9, False)]
