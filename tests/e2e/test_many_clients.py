"""Many clients at once, each of which gets what it would get alone. Design section 1.2."""

from __future__ import annotations

import random
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import tinker
from tinker import types

from tests.e2e.client import (
    MODEL,
    PROBE,
    adam,
    assert_same,
    fingerprint,
    generate,
    new_run,
    rl,
    same,
    sampler_fingerprint,
    sampler_of,
    sft,
    step,
    text,
    train,
    wait,
)
from tests.running_server import RunningServer

STEPS = 4


@dataclass
class Plan:
    """What one client does: fixed by its number."""

    number: int
    rank: int
    loss: str
    flags: dict[str, bool] = field(default_factory=dict)
    tenant: str = "alice"

    def batch(self, number: int) -> list[types.Datum]:
        seeds = [100 * self.number + 10 * number + i for i in range(1 + self.number % 3)]
        return [self._datum(seed) for seed in seeds]

    def _datum(self, seed: int) -> types.Datum:
        tokens = text(seed, 5 + seed % 30)
        if self.loss == "cross_entropy":
            return sft(tokens)
        rng = np.random.default_rng(seed)
        n = len(tokens) - 1
        more: dict[str, Any] = {"sequence_ratio_mask": [1.0] * n} if self.loss == "gspo" else {}
        return rl(tokens, rng.uniform(-6, -4, n).tolist(), rng.normal(size=n).tolist(), **more)


PLANS = [
    Plan(0, 1, "cross_entropy"),
    Plan(1, 4, "ppo", {"train_unembed": False}),
    Plan(2, 8, "cross_entropy", {"train_attn": False}, "bob"),
    Plan(3, 16, "importance_sampling", {"train_mlp": False}),
    Plan(4, 64, "cispo", {}, "bob"),
    Plan(5, 32, "dro", {"train_attn": False, "train_unembed": False}),
    Plan(6, 3, "gspo", {}, "bob"),
    Plan(7, 64, "cross_entropy", {"train_mlp": False, "train_unembed": False}),
]


def _work(server: RunningServer, plan: Plan, pause: threading.Event | None = None) -> np.ndarray:
    """Everything one client does; what its weights are in the end, to the trainer and the
    sampler."""
    client = tinker.ServiceClient(base_url=server.url, api_key=server.keys[plan.tenant])
    run = new_run(client, seed=plan.number, rank=plan.rank, **plan.flags)
    order = random.Random(plan.number)
    futures: list[Any] = []
    for number in range(STEPS):
        futures.append(run.forward_backward(plan.batch(number), plan.loss))  # type: ignore[arg-type]
        if pause is not None and order.random() < 0.5:
            pause.wait(order.random() / 10)
        futures.append(run.optim_step(adam(1e-3, eps=1e-8)))
        if order.random() < 0.3:
            futures.append(run.forward(plan.batch(number), plan.loss))  # type: ignore[arg-type]
    for future in futures:
        wait(future)
    sampler = sampler_of(run)
    generate(sampler, PROBE, 10)
    trained = fingerprint(run)
    assert_same(sampler_fingerprint(sampler), trained, 1e-3)
    return trained


def test_eight_clients_of_all_ranks_losses_and_flags_each_get_their_solo_run(
    server: RunningServer,
) -> None:
    """public-reports D53, from-users 15: eight threads, in random order, two tenants."""
    with ThreadPoolExecutor(8) as pool:
        together = list(pool.map(lambda plan: _work(server, plan, threading.Event()), PLANS))
    for plan, found in zip(PLANS, together, strict=True):
        assert_same(found, _work(server, plan), 1e-4)
    assert not any(same(a, b) for i, a in enumerate(together) for b in together[:i])


def test_a_flood_of_one_tenant_does_not_hold_up_another(
    service: tinker.ServiceClient, server: RunningServer
) -> None:
    """Design 1.5: with 60 batches queued, a small step of another tenant is among the next."""
    flood = new_run(service, seed=1)
    small = new_run(tinker.ServiceClient(base_url=server.url, api_key=server.keys["bob"]), seed=2)
    step(small)
    batch = [sft(text(seed, 200)) for seed in range(3)]
    futures = [flood.forward_backward(batch, "cross_entropy") for _ in range(60)]
    wait(futures[0])
    step(small)
    left = sum(not future.future().done() for future in futures)
    assert left > 30
    for future in futures:
        wait(future)
    assert wait(flood.optim_step(adam(0.0))).metrics["num_gradients"] == 60


def test_two_thousand_samples_of_one_client_are_all_generated_and_hold_up_nobody_else(
    service: tinker.ServiceClient, server: RunningServer
) -> None:
    """As many as the SDK lets one client have under way."""
    flood = wait(service.create_sampling_client(base_model=MODEL))
    bob = tinker.ServiceClient(base_url=server.url, api_key=server.keys["bob"])
    other = wait(bob.create_sampling_client(base_model=MODEL))
    prompt = types.ModelInput.from_ints(PROBE)
    params = types.SamplingParams(max_tokens=2, stop=[])
    futures = [flood.sample(prompt, 1, params) for _ in range(2000)]
    wait(futures[0])
    wait(other.sample(prompt, 1, params))
    left = sum(not future.future().done() for future in futures)
    assert left > 1000
    for future in futures:
        assert len(wait(future).sequences[0].tokens) == 2


def test_a_run_made_after_another_ended_is_a_fresh_one(server: RunningServer) -> None:
    """public-reports D46: the same rank and seed; the first one's session is finished, which
    frees its tensors."""
    prints = []
    for _ in range(2):
        client = tinker.ServiceClient(base_url=server.url, api_key=server.keys["alice"])
        run = new_run(client, seed=5)
        step(run)
        prints.append((fingerprint(run), sampler_fingerprint(sampler_of(run))))
        train(run, 3, [sft(text(1))])
        wait(client.close("success"))
    assert_same(prints[0][0], prints[1][0], 1e-5)
    assert_same(prints[0][1], prints[1][1], 1e-4)


def test_a_run_whose_session_ended_can_still_be_resumed_and_sampled_by_path(
    server: RunningServer, service: tinker.ServiceClient
) -> None:
    client = tinker.ServiceClient(base_url=server.url, api_key=server.keys["alice"])
    run = new_run(client, seed=6)
    train(run, 2)
    state = wait(run.save_state("kept")).path
    weights = wait(run.save_weights_for_sampler("kept")).path
    expected = fingerprint(run)
    wait(client.close("success"))
    resumed = wait(service.create_training_client_from_state(state))
    assert_same(fingerprint(resumed), expected, 1e-5)
    sampler = wait(service.create_sampling_client(model_path=weights))
    assert_same(sampler_fingerprint(sampler), expected)
