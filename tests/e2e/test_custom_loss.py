"""Losses of the client's own, run on the server: equal to the client's arithmetic, and no more."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import tinker
import torch
import torch.nn.functional as F
from tinker import types

from tests.e2e.client import (
    adam,
    assert_same,
    fingerprint,
    new_run,
    refused,
    rl,
    sft,
    text,
    wait,
)
from tests.running_server import RunningServer

TOKENS = text(5, 12)


def neg_ll(logprobs: Any, weights: Any) -> Any:
    loss = -(logprobs * weights).sum()
    return loss, {"custom/neg_ll:sum": loss, "custom/weight:mean": weights.sum()}


def clipped(logprobs: Any, old: Any, advantages: Any) -> Any:
    ratio = (logprobs - old).exp()
    gain = torch.minimum(ratio * advantages, torch.clamp(ratio, 0.8, 1.2) * advantages)
    kl = (old - logprobs).exp() - (old - logprobs) - 1
    return (0.05 * kl - gain).sum(), {
        "custom/kl:mean": kl.mean(),
        "custom/ratio:mean": ratio.mean(),
    }


def preference(logprobs: Any, weights: Any, margin: Any) -> Any:
    score = (torch.where(weights > 0, logprobs, torch.zeros_like(logprobs))).sum() - margin
    return -F.logsigmoid(0.1 * score), {"custom/won:mean": (score > 0).float()}


def smooth(logprobs: Any, target_tokens: Any) -> Any:
    steps = torch.arange(logprobs.shape[0], device=logprobs.device)
    odd = (target_tokens + steps).remainder(2).bool()
    changes = F.huber_loss(logprobs[1:], logprobs[:-1], reduction="sum")
    return changes - logprobs[odd].cumsum(0).sum(), {"custom/odd:sum": odd.sum()}


def spread(logprobs: Any, weights: Any) -> Any:
    logs = torch.log_softmax(logprobs, dim=-1)
    entropy = -(logs.exp() * logs).sum(-1)
    loss = -torch.einsum("nk,nk->", logprobs, weights) + entropy.mean()
    return loss, {"custom/entropy:mean": entropy.mean()}


LOSSES: dict[Callable[..., Any], dict[str, Any]] = {
    neg_ll: {"logprobs": 1, "weights": 1},
    clipped: {"logprobs": 1, "old": 1, "advantages": 1},
    preference: {"logprobs": 1, "weights": 1, "margin": 0},
    smooth: {"logprobs": 1, "target_tokens": 1},
    spread: {"logprobs": 2, "weights": 2},
}


def datum(seed: int, length: int, ranks: dict[str, Any]) -> types.Datum:
    draw = np.random.default_rng(seed)
    tokens = text(seed, length + 1)
    shape = (length, 3) if ranks["logprobs"] == 2 else (length,)
    values: dict[str, Any] = {
        "target_tokens": draw.integers(32, 127, shape) if len(shape) == 2 else tokens[1:],
        "weights": draw.random(shape).astype(np.float32),
        "old": -draw.random(shape).astype(np.float32) * 5,
        "advantages": draw.standard_normal(shape).astype(np.float32),
        "margin": torch.tensor(0.25),
    }
    wanted = {"target_tokens", *ranks} - {"logprobs"}
    return types.Datum(
        model_input=types.ModelInput.from_ints(tokens[:-1]),
        loss_fn_inputs={name: values[name] for name in wanted},
    )


@pytest.mark.parametrize("fn", LOSSES, ids=lambda fn: fn.__name__)
def test_the_server_computes_what_the_client_does(
    service: tinker.ServiceClient, fn: Callable[..., Any]
) -> None:
    ranks = LOSSES[fn]
    data = [datum(seed, length, ranks) for seed, length in ((1, 5), (2, 9), (3, 3))]
    handle = wait(service.create_custom_loss(fn, input_ranks=ranks))
    assert handle.loss_id is not None
    here, there = new_run(service, seed=7), new_run(service, seed=7)
    for _ in range(2):
        client = wait(here.forward_backward_custom(data, replace(handle, loss_id=None)))
        server = wait(there.forward_backward_custom(data, handle))
        client.metrics.pop("surrogate_loss:sum")
        ours = {name: server.metrics[name] for name in client.metrics if "custom/" in name}
        theirs = {name: value for name, value in client.metrics.items() if "custom/" in name}
        assert ours == pytest.approx(theirs, rel=1e-5, abs=1e-5)
        assert server.metrics["loss:sum"] == pytest.approx(client.metrics["loss:sum"], rel=1e-5)
        for run in (here, there):
            wait(run.optim_step(adam()))
        assert_same(fingerprint(here), fingerprint(there), 1e-5)


@contextmanager
def untouched(service: tinker.ServiceClient) -> Iterator[tinker.TrainingClient]:
    """A run that has a gradient waiting, and has nothing else when the block is over."""
    run, twin = new_run(service, seed=11), new_run(service, seed=11)
    for one in (run, twin):
        wait(one.forward_backward([sft(TOKENS)], "cross_entropy"))
    yield run
    for one in (run, twin):
        wait(one.optim_step(adam()))
    assert_same(fingerprint(run), fingerprint(twin), 1e-5)


def test_a_forward_leaves_no_gradient(service: tinker.ServiceClient) -> None:
    def doubled(logprobs: Any, weights: Any) -> Any:
        return -2 * (logprobs * weights).sum(), {}

    handle = wait(create(service, doubled, logprobs=1, weights=1))
    with untouched(service) as run:
        config = {"loss_id": handle.loss_id}
        output = wait(run.forward([sft(TOKENS)], "custom", config))
        assert output.metrics["loss:sum"] > 0


def create(service: tinker.ServiceClient, fn: Any, **ranks: Any) -> Any:
    return service.create_custom_loss(fn, input_ranks=ranks)


def test_what_is_not_allowed_is_refused_by_its_node(service: tinker.ServiceClient) -> None:
    def random(logprobs: Any) -> Any:
        noise = torch.rand_like(logprobs)
        return (logprobs * noise).sum(), {}

    with refused("random", "rand_like"):
        wait(create(service, random, logprobs=1))


def test_one_that_fails_when_it_runs_fails_alone(service: tinker.ServiceClient) -> None:
    def huge(logprobs: Any) -> Any:
        wide = logprobs.repeat(2**30)
        return wide.sum(), {}

    def infinite(logprobs: Any) -> Any:
        return (logprobs * torch.inf).sum(), {}

    for fn, words in ((huge, ["repeat", "limit"]), (infinite, ["loss is -inf"])):
        handle = wait(create(service, fn, logprobs=1))
        with untouched(service) as run, refused("datum 0", "node", *words):
            wait(run.forward_backward_custom([sft(TOKENS)], handle))


def test_an_input_that_is_missing_is_named(service: tinker.ServiceClient) -> None:
    def reads_margin(logprobs: Any, margin: Any) -> Any:
        return logprobs.sum() * margin, {}

    handle = wait(create(service, reads_margin, logprobs=1, margin=0))
    config = {"loss_id": handle.loss_id}
    with untouched(service) as run, refused("data[0]", "margin", "missing"):
        wait(run.forward_backward([sft(TOKENS)], "custom", config))
    wrong = rl(TOKENS, [0.0] * 11, [0.0] * 11, margin=np.zeros(11, np.float32))
    with refused("margin", "rank 0"):
        wait(run.forward_backward([wrong], "custom", config))


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"loss_id": "nowhere"}, ["loss_id", "nowhere"]),
        ({"loss_id": 3.0}, ["loss_id"]),
        ({}, ["loss_id"]),
        ({"loss_id": "x", "beta": 1.0}, ["beta"]),
    ],
)
def test_a_loss_that_does_not_exist_is_refused(
    service: tinker.ServiceClient, config: Any, words: Sequence[str]
) -> None:
    run = new_run(service)
    with refused(*words):
        wait(run.forward_backward([sft(TOKENS)], "custom", config))


def test_a_loss_is_its_session_s_alone(
    service: tinker.ServiceClient, server: RunningServer
) -> None:
    def tripled(logprobs: Any) -> Any:
        return -3 * logprobs.sum(), {}

    mine = wait(create(service, tripled, logprobs=1))
    for key in ("alice", "bob"):
        other = tinker.ServiceClient(base_url=server.url, api_key=server.keys[key])
        run = new_run(other)
        with refused("loss_id", "no custom loss"):
            wait(run.forward_backward([sft(TOKENS)], "custom", {"loss_id": mine.loss_id}))
