"""Each kind of bad input is refused at once, in words that name it, and leaves the run as it was:
a gradient waits while the refusal happens, and the step after it is the step of a run that never
saw it. Issue 2 item 9."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tinker
from tinker import types

from tests.e2e.client import (
    DATA,
    MAX_CONTEXT_LENGTH,
    MODEL,
    UNTIED,
    VOCAB_SIZE,
    adam,
    assert_same,
    fingerprint,
    fresh,
    new_run,
    prompt,
    refused,
    rl,
    sft,
    step,
    text,
    wait,
)
from tests.running_server import RunningServer

AT_ONCE_S = 2.0


def _datum(inputs: dict[str, Any], tokens: list[int] | None = None) -> types.Datum:
    return types.Datum(
        model_input=types.ModelInput.from_ints(text(1, 5) if tokens is None else tokens),
        loss_fn_inputs=inputs,
    )


def _array(values: Any, dtype: Any) -> types.TensorData:
    return types.TensorData.from_numpy(np.array(values, dtype=dtype))


GOOD = sft(text(2, 9))
TARGETS = text(3, 5)
ONES = [1.0] * 5
OUTSIDE = sft([*text(4, 7), VOCAB_SIZE, *text(4, 3)])

BAD_PASSES: dict[str, tuple[list[types.Datum], str, dict[str, Any] | None, tuple[str, ...]]] = {
    "an empty datum": (
        [_datum({"target_tokens": [], "weights": []}, [])],
        "cross_entropy",
        None,
        ("data[0].model_input", "at least 1"),
    ),
    # from-users 5, public-reports B31
    "a datum one token over the context": (
        [GOOD, sft(text(5, MAX_CONTEXT_LENGTH + 2))],
        "cross_entropy",
        None,
        ("data[1].model_input", str(MAX_CONTEXT_LENGTH + 1), str(MAX_CONTEXT_LENGTH)),
    ),
    "a datum ten times over the context": (
        [sft(text(5, 5001))],
        "cross_entropy",
        None,
        ("data[0].model_input", "5000", str(MAX_CONTEXT_LENGTH)),
    ),
    "a target length of N-1": (
        [_datum({"target_tokens": TARGETS[:-1], "weights": ONES[:-1]})],
        "cross_entropy",
        None,
        ("data[0]", "target_tokens", "length 4", "5 tokens"),
    ),
    "weights of another length than the targets": (
        [_datum({"target_tokens": TARGETS, "weights": ONES[:-1]})],
        "cross_entropy",
        None,
        ("weights", "length 4"),
    ),
    # from-users 6, public-reports A14
    "a token id equal to the vocabulary size": (
        [GOOD, GOOD, OUTSIDE],
        "cross_entropy",
        None,
        ("data[2]", "256", "position 7"),
    ),
    "a negative token id": ([sft([65, -1, 66, 67])], "cross_entropy", None, ("data[0]", "-1")),
    "a target outside the vocabulary": (
        [_datum({"target_tokens": [*TARGETS[:4], 300], "weights": ONES})],
        "cross_entropy",
        None,
        ("target_tokens", "300", "position 4"),
    ),
    "a NaN weight": ([sft(text(2, 6), [1, 1, math.nan, 1, 1])], "cross_entropy", None, ("nan",)),
    "an infinite advantage": (
        [rl(text(2, 6), [-1.0] * 5, [1.0, math.inf, 1, 1, 1])],
        "ppo",
        None,
        ("advantages", "inf", "position 1"),
    ),
    "an old logprob of minus infinity": (
        [rl(text(2, 6), [-math.inf] * 5, [1.0] * 5)],
        "importance_sampling",
        None,
        ("logprobs", "inf"),
    ),
    "missing targets": ([_datum({"weights": ONES})], "cross_entropy", None, ("target_tokens",)),
    "missing advantages": (
        [_datum({"target_tokens": TARGETS, "logprobs": ONES})],
        "ppo",
        None,
        ("advantages", "missing"),
    ),
    "an input that the loss does not read": (
        [_datum({"target_tokens": TARGETS, "rewards": _array(ONES, np.float32)})],
        "cross_entropy",
        None,
        ("rewards", "not known"),
    ),
    "targets that are no integers": (
        [_datum({"target_tokens": _array(ONES, np.float32)})],
        "cross_entropy",
        None,
        ("target_tokens", "integers"),
    ),
    "three dimensions": (
        [_datum({"target_tokens": _array(np.ones((5, 2, 2)), np.int64)})],
        "cross_entropy",
        None,
        ("target_tokens", "3 dimensions"),
    ),
    "no targets a position": (
        [_datum({"target_tokens": _array(np.ones((5, 0)), np.int64)})],
        "cross_entropy",
        None,
        ("target_tokens",),
    ),
    "an unknown loss": ([GOOD], "no_such_loss", None, ("no_such_loss", "cross_entropy")),
    "a loss with control characters": ([GOOD], "a\x00\n\x1b[31m", None, ("loss_fn",)),
    # from-users 12
    "an unknown loss key": (
        [rl(text(2, 6), [-1.0] * 5, [1.0] * 5)],
        "ppo",
        {"kl_beta": 0.05},
        ("kl_beta", "clip_low_threshold"),
    ),
    "a loss key that is text": (
        [rl(text(2, 6), [-1.0] * 5, [1.0] * 5)],
        "dro",
        {"beta": "0.1"},
        ("beta", "number"),
    ),
    "a loss key that is NaN": (
        [rl(text(2, 6), [-1.0] * 5, [1.0] * 5)],
        "dro",
        {"beta": math.nan},
        ("beta", "nan"),
    ),
    "an image": (
        [
            types.Datum(
                model_input=types.ModelInput(
                    chunks=[types.ImageChunk(data=b"\x89PNG", format="png")]
                ),
                loss_fn_inputs={"target_tokens": TARGETS},
            )
        ],
        "cross_entropy",
        None,
        ("image", "encoded_text"),
    ),
}


@pytest.fixture(scope="module")
def run(service: tinker.ServiceClient) -> Iterator[tinker.TrainingClient]:
    """All the refusals of this file happen to one run; in the end its weights are those of a run
    that never saw any."""
    run, spared = new_run(service, seed=11), new_run(service, seed=11)
    yield run
    assert_same(fingerprint(run), fingerprint(spared), 1e-5)


@pytest.fixture(scope="module")
def gradient_norm(run: tinker.TrainingClient) -> float:
    wait(run.forward_backward(DATA, "cross_entropy"))
    return wait(run.optim_step(adam(0.0))).metrics["grad_norm"]


@pytest.fixture
def untouched(run: tinker.TrainingClient, gradient_norm: float) -> Iterator[None]:
    """A gradient waits during the test, and is what a step finds afterwards. (The step has a
    learning rate of 0, so the next test finds the same run.)"""
    wait(run.forward_backward(DATA, "cross_entropy"))
    yield
    metrics = wait(run.optim_step(adam(0.0))).metrics
    assert metrics["num_gradients"] == 1
    assert metrics["grad_norm"] == gradient_norm


@pytest.mark.parametrize("kind", BAD_PASSES)
def test_a_bad_batch_is_a_user_error_and_leaves_no_trace(
    run: tinker.TrainingClient, untouched: None, kind: str
) -> None:
    data, loss, config, words = BAD_PASSES[kind]
    started = time.monotonic()
    for send in (run.forward_backward, run.forward):
        with refused(*words):
            wait(send(data, loss, config))  # type: ignore[arg-type]
    assert time.monotonic() - started < 2 * AT_ONCE_S


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("learning_rate", -1e-3),
        ("learning_rate", math.inf),
        ("beta1", 1.0),
        ("beta2", -0.1),
        ("eps", -1e-9),
        ("weight_decay", math.nan),
        ("grad_clip_norm", -1.0),
    ],
)
def test_a_step_with_an_impossible_setting_is_refused(
    run: tinker.TrainingClient, untouched: None, field: str, value: float
) -> None:
    """NaN and infinity leave the SDK as null, which must not mean "the default"."""
    with refused(field):
        wait(run.optim_step(types.AdamParams(**{field: value})))


@pytest.mark.parametrize(
    ("name", "rule"),
    [
        ("../../../escape", "not allowed"),
        ("a/../../b", "not allowed"),
        ("/abs", "not allowed"),
        ("a\\b", "not allowed"),
        ("..", "not allowed"),
        (".hidden", "not allowed"),
        ("", "empty"),
        (" ", "not allowed"),
        ("trailing ", "not allowed"),
        ("nul\x00byte", "not allowed"),
        ("new\nline", "not allowed"),
        ("escape\x1b[31m", "not allowed"),
        ("n" * 300, "300 characters"),
        ("ｃheckpoint", "not allowed"),  # a full-width c
        ("сheckpoint", "not allowed"),  # a Cyrillic s
        ("a\u200bb", "not allowed"),
        ("%2e%2e%2fx", "not allowed"),
    ],
)
def test_a_bad_checkpoint_name_is_refused_by_all_three_saves(
    server: RunningServer, run: tinker.TrainingClient, untouched: None, name: str, rule: str
) -> None:
    """from-users 17, public-reports C38: nothing is written, inside the data folder or outside."""
    before = _weights(server)
    for save in (run.save_state, run.save_weights_for_sampler, run.save_weights_external):
        with refused(rule):
            wait(save(name))
    assert _weights(server) == before
    assert not list(server.data.parent.rglob("*escape*"))


def _weights(server: RunningServer) -> list[Path]:
    return sorted((server.data / "weights").rglob("*"))


@pytest.mark.parametrize("seconds", [3599, 10 * 365 * 24 * 3600 + 1, 0, -1])
def test_a_lifetime_out_of_bounds_is_refused_with_the_bounds(
    run: tinker.TrainingClient, untouched: None, seconds: int
) -> None:
    """from-users 4"""
    for save in (run.save_state, run.save_weights_for_sampler, run.save_weights_external):
        with refused("ttl_seconds", "3600", "315360000"):
            wait(save(fresh(), ttl_seconds=seconds))


def test_a_name_clash_is_a_failed_future_at_once(
    run: tinker.TrainingClient, untouched: None
) -> None:
    """from-users 13"""
    name = fresh("taken")
    for save in (run.save_state, run.save_weights_for_sampler, run.save_weights_external):
        wait(save(name))
        started = time.monotonic()
        with pytest.raises(tinker.RequestFailedError, match="exists already") as caught:
            wait(save(name))
        assert caught.value.category == "user"
        assert time.monotonic() - started < AT_ONCE_S


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"base_model": "no/such"}, ("no/such", MODEL)),
        ({"rank": 0}, ("rank", "1 to 256")),
        ({"rank": 257}, ("rank", "257", "1 to 256")),
        ({"rank": -1}, ("rank",)),
    ],
)
def test_a_run_that_cannot_be_made_is_refused_at_once(
    service: tinker.ServiceClient, options: dict[str, Any], words: tuple[str, ...]
) -> None:
    """public-reports A10: it never hangs."""
    started = time.monotonic()
    with refused(*words):
        new_run(service, **options)
    assert time.monotonic() - started < AT_ONCE_S


def test_a_training_optimizer_that_is_not_here_is_refused(service: tinker.ServiceClient) -> None:
    with refused("dimuon", "adamw"):
        new_run(service, optimizer=types.DimuonOptimizerConfig())


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda path: path.replace("/weights/", "/sampler_weights/"), ("sampler_weights",)),
        (lambda path: path + "-gone", ("does not exist",)),
        (lambda path: path + "/more", ("form",)),
        (lambda path: "tinker://" + "x" * 5000, ("form",)),
        (lambda path: path.replace(":train:", ":train:9"), ("does not exist",)),
        (lambda path: path.rsplit("/", 1)[0] + "/..", ("not allowed",)),
    ],
)
def test_a_path_that_cannot_be_loaded_is_refused(
    service: tinker.ServiceClient,
    run: tinker.TrainingClient,
    untouched: None,
    make: Callable[[str], str],
    words: tuple[str, ...],
) -> None:
    """public-reports A12, C41: the message names both kinds."""
    path = make(wait(run.save_state(fresh())).path)
    with refused(*words):
        wait(run.load_state(path))
    with refused(*words):
        wait(service.create_training_client_from_state(path))


def test_a_sampler_path_is_refused_where_a_training_path_is_needed(
    service: tinker.ServiceClient, run: tinker.TrainingClient, untouched: None
) -> None:
    """public-reports C41, A12: and the loss after it with a bad key as well."""
    path = wait(run.save_weights_for_sampler(fresh())).path
    with refused("sampler_weights", "weights", "save_state"):
        wait(run.load_state(path))
    data = [rl(text(2, 6), [-1.0] * 5, [1.0] * 5)]
    with refused("kl_beta"):
        wait(run.forward_backward(data, "importance_sampling", {"kl_beta": 0.05}))


def test_a_training_path_is_refused_where_a_sampler_path_is_needed(
    service: tinker.ServiceClient, run: tinker.TrainingClient, untouched: None
) -> None:
    path = wait(run.save_state(fresh())).path
    with refused("sampler_weights", "save_weights_for_sampler"):
        wait(service.create_sampling_client(model_path=path))


def test_a_checkpoint_of_another_rank_or_other_flags_or_another_model_is_refused(
    service: tinker.ServiceClient, run: tinker.TrainingClient, untouched: None
) -> None:
    """public-reports D53"""
    others = {
        "rank": new_run(service, rank=4),
        "train_unembed": new_run(service, train_unembed=False),
        UNTIED: new_run(service, base_model=UNTIED),
    }
    for word, other in others.items():
        path = wait(other.save_state(fresh())).path
        with refused(word):
            wait(run.load_state(path))


@pytest.mark.parametrize(
    ("params", "words"),
    [
        ({"max_tokens": 0}, ("max_tokens",)),
        ({"temperature": -0.5}, ("temperature",)),
        ({"top_p": 0.0}, ("top_p",)),
        ({"top_p": 1.5}, ("top_p",)),
        ({"top_k": 0}, ("top_k",)),
        ({"top_k": -2}, ("top_k",)),
        ({"stop": [VOCAB_SIZE]}, ("stop", "256")),
        ({"stop": ""}, ("stop", "empty")),
    ],
)
def test_impossible_sampling_parameters_are_refused_at_once(
    base: tinker.SamplingClient, params: dict[str, Any], words: tuple[str, ...]
) -> None:
    started = time.monotonic()
    with refused(*words):
        wait(base.sample(prompt(text(1)), 1, types.SamplingParams(**params)))
    assert time.monotonic() - started < AT_ONCE_S
    assert wait(base.sample(prompt(text(1)), 1, types.SamplingParams(max_tokens=1))).sequences


@pytest.mark.parametrize(
    ("tokens", "options", "words"),
    [
        ([], {}, ("prompt", "at least 1")),
        ([65, VOCAB_SIZE], {}, ("prompt", "256", "position 1")),
        ([65, -5], {}, ("prompt", "-5")),
        (text(1, MAX_CONTEXT_LENGTH), {}, ("prompt", "512", "511")),
        ([65, 66], {"topk_prompt_logprobs": 101}, ("topk_prompt_logprobs", "101", "100")),
        ([65, 66], {"topk_sample_logprobs": 101}, ("topk_sample_logprobs", "100")),
        ([65, 66], {"prompt_alt_tokens_k": 101}, ("prompt_alt_tokens_k", "100")),
        ([65, 66], {"num_samples": 0}, ("num_samples",)),
        ([65, 66], {"num_samples": 5000}, ("num_samples", "1024")),
        (
            [65, 66],
            {"target_prompt_logprobs": _array([[VOCAB_SIZE]], np.int64)},
            ("target_prompt_logprobs", "256"),
        ),
        (
            [65, 66],
            {"target_prompt_logprobs": _array([[1], [2]], np.int64)},
            ("target_prompt_logprobs", "[1, K]"),
        ),
    ],
)
def test_an_impossible_prompt_or_question_is_refused_at_once(
    base: tinker.SamplingClient, tokens: list[int], options: dict[str, Any], words: tuple[str, ...]
) -> None:
    """from-users 3: topk above the limit is one clear refusal, never a silent cap."""
    num_samples = options.pop("num_samples", 1)
    params = types.SamplingParams(max_tokens=1)
    started = time.monotonic()
    with refused(*words):
        wait(base.sample(prompt(tokens), num_samples, params, **options))
    assert time.monotonic() - started < AT_ONCE_S


@pytest.fixture(scope="module")
def base(service: tinker.ServiceClient) -> tinker.SamplingClient:
    return wait(service.create_sampling_client(base_model=MODEL))


def test_an_unknown_base_model_is_no_sampler(service: tinker.ServiceClient) -> None:
    with refused("no/such", MODEL):
        wait(service.create_sampling_client(base_model="no/such"))


def test_metadata_that_is_no_text_becomes_text(
    service: tinker.ServiceClient, rest: tinker.RestClient
) -> None:
    """Protocol 8.5: one value that is no string would break the listing of every run."""
    run = new_run(service, user_metadata={"steps": 3, "nested": {"a": [1]}})  # type: ignore[dict-item]
    metadata = wait(rest.get_training_run(run.model_id)).user_metadata
    assert metadata == {"steps": "3", "nested": "{'a': [1]}"}
    step(run)
