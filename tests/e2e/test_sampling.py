"""What a sample is: its randomness, its numbers, its length, and the weights it comes from."""

from __future__ import annotations

import pickle
import shutil
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tinker
import torch
from tinker import types
from transformers import AutoModelForCausalLM

from tests.e2e.client import (
    MAX_CONTEXT_LENGTH,
    MODEL,
    PROBE,
    PROTOBUF,
    Raw,
    assert_same,
    fingerprint,
    generate,
    new_run,
    pass_body,
    prompt,
    refused,
    same,
    sampler_fingerprint,
    sampler_of,
    sft,
    text,
    train,
    wait,
)
from tests.running_server import RunningServer


@pytest.fixture(scope="module")
def base(service: tinker.ServiceClient) -> tinker.SamplingClient:
    return wait(service.create_sampling_client(base_model=MODEL))


@pytest.fixture(scope="module")
def trained(service: tinker.ServiceClient) -> tinker.TrainingClient:
    run = new_run(service, seed=21)
    train(run, 3, [sft(text(seed)) for seed in range(3)])
    return run


@pytest.fixture(scope="module")
def adapted(trained: tinker.TrainingClient) -> tinker.SamplingClient:
    return sampler_of(trained)


def sequences(
    sampler: tinker.SamplingClient, tokens: list[int], num_samples: int, **params: Any
) -> list[list[int]]:
    sampled = sampler.sample(prompt(tokens), num_samples, types.SamplingParams(**params))
    return [sequence.tokens for sequence in wait(sampled).sequences]


# ---------------------------------------------------------------- randomness


def test_a_seed_repeats_all_samples_of_a_call_and_they_differ_from_each_other(
    adapted: tinker.SamplingClient,
) -> None:
    """from-users 2, public-reports E57"""
    first, second = [sequences(adapted, PROBE, 32, max_tokens=16, seed=7) for _ in range(2)]
    assert first == second
    assert len({tuple(tokens) for tokens in first}) == 32
    assert sequences(adapted, PROBE, 32, max_tokens=16, seed=8) != first


def test_a_seed_repeats_whatever_else_is_being_sampled(adapted: tinker.SamplingClient) -> None:
    alone = sequences(adapted, PROBE, 2, max_tokens=30, seed=5)
    params = types.SamplingParams(max_tokens=60)
    others = [adapted.sample(prompt(text(seed, 9)), 2, params) for seed in range(10)]
    assert sequences(adapted, PROBE, 2, max_tokens=30, seed=5) == alone
    for other in others:
        wait(other)


def test_without_a_seed_samples_differ(adapted: tinker.SamplingClient) -> None:
    calls = [sequences(adapted, PROBE, 4, max_tokens=16) for _ in range(2)]
    assert len({tuple(tokens) for call in calls for tokens in call}) == 8


def test_temperature_zero_is_greedy_a_hundred_times(
    base: tinker.SamplingClient, model_path: Path
) -> None:
    """public-reports E55: and the choice is transformers'."""
    greedy = _transformers_greedy(model_path, PROBE, 16)
    found = sequences(base, PROBE, 100, max_tokens=16, temperature=0.0, stop=[])
    assert {tuple(tokens) for tokens in found} == {tuple(greedy)}


@pytest.mark.parametrize("params", [{"temperature": 1e-8}, {"top_k": 1}, {"top_p": 1e-9}])
def test_what_leaves_one_choice_is_greedy_too(
    base: tinker.SamplingClient, model_path: Path, params: dict[str, Any]
) -> None:
    """public-reports E55"""
    greedy = _transformers_greedy(model_path, PROBE, 16)
    found = sequences(base, PROBE, 10, max_tokens=16, stop=[], **params)
    assert {tuple(tokens) for tokens in found} == {tuple(greedy)}


def _transformers_greedy(path: Path, tokens: list[int], length: int) -> list[int]:
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float64)
    row = list(tokens)
    with torch.no_grad():
        for _ in range(length):
            row.append(int(model(input_ids=torch.tensor([row])).logits[0, -1].argmax()))
    return row[len(tokens) :]


def test_tokens_are_drawn_with_the_models_probabilities(
    base: tinker.SamplingClient, model_path: Path
) -> None:
    """First tokens of 2,048 samples against transformers' distribution, at T = 1 and T = 0.5."""
    model = AutoModelForCausalLM.from_pretrained(model_path, dtype=torch.float64)
    with torch.no_grad():
        logits = model(input_ids=torch.tensor([PROBE])).logits[0, -1]
    for temperature in (1.0, 0.5):
        expected = (logits / temperature).softmax(-1).numpy()
        drawn = [
            tokens[0]
            for _ in range(2)
            for tokens in sequences(base, PROBE, 1024, max_tokens=1, temperature=temperature)
        ]
        share = np.bincount(drawn, minlength=256) / len(drawn)
        deviation = np.sqrt(expected * (1 - expected) / len(drawn))
        assert np.abs(share - expected).max() < 5 * deviation.max()


# ---------------------------------------------------------------- numbers


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_returned_logprobs_are_the_models_own_at_any_temperature(
    adapted: tinker.SamplingClient, temperature: float
) -> None:
    """public-reports E59: not tempered, not filtered."""
    sampled = generate(
        adapted, PROBE, 20, temperature=temperature, top_k=50, top_p=0.9, stop=[], seed=1
    )
    scored = sampler_fingerprint(adapted, [*PROBE, *sampled.tokens])
    assert_same(np.array(sampled.logprobs), scored[-20:])


def test_a_sample_scored_by_its_trainer_has_the_same_logprobs_to_the_last_token(
    trained: tinker.TrainingClient, adapted: tinker.SamplingClient
) -> None:
    """public-reports B18"""
    sampled = generate(adapted, PROBE, 20, stop=[], seed=2)
    scored = fingerprint(trained, [*PROBE, *sampled.tokens])
    assert_same(scored[-20:], np.array(sampled.logprobs), 1e-3)


def test_prompt_logprobs_and_their_topk_line_up_with_forward(
    trained: tinker.TrainingClient, adapted: tinker.SamplingClient
) -> None:
    """public-reports E61"""
    answer = wait(
        adapted.sample(
            prompt(PROBE),
            1,
            types.SamplingParams(max_tokens=1),
            include_prompt_logprobs=True,
            topk_prompt_logprobs=3,
        )
    )
    assert len(answer.prompt_logprobs) == len(answer.topk_prompt_logprobs) == len(PROBE)
    assert answer.prompt_logprobs[0] is None
    assert answer.topk_prompt_logprobs[0] is None
    assert_same(np.array(answer.prompt_logprobs[1:]), fingerprint(trained))
    assert_same(sampler_fingerprint(adapted), fingerprint(trained))
    for position, best in enumerate(answer.topk_prompt_logprobs[1:], 1):
        assert len(best) == 3
        logprobs = [logprob for _, logprob in best]
        assert logprobs == sorted(logprobs, reverse=True)
        by_token = dict(best)
        if PROBE[position] in by_token:
            assert abs(by_token[PROBE[position]] - answer.prompt_logprobs[position]) < 1e-5


def test_topk_50_is_50_at_each_position(base: tinker.SamplingClient, model_path: Path) -> None:
    """from-users 3: and they are transformers' 50 best."""
    answer = wait(
        base.sample(
            prompt(PROBE),
            1,
            types.SamplingParams(max_tokens=4, stop=[]),
            include_prompt_logprobs=True,
            topk_prompt_logprobs=50,
            topk_sample_logprobs=50,
        )
    )
    rows = answer.topk_prompt_logprobs[1:]
    assert {len(row) for row in rows} == {50}
    assert {len(row) for row in answer.sequences[0].topk_logprobs} == {50}
    model = AutoModelForCausalLM.from_pretrained(model_path, dtype=torch.float64)
    with torch.no_grad():
        logprobs = model(input_ids=torch.tensor([PROBE])).logits[0].log_softmax(-1)
    for row, expected in zip(rows, logprobs[:-1].topk(50).values, strict=True):
        assert_same(np.array([logprob for _, logprob in row]), expected.numpy())


def test_chosen_targets_are_scored_where_they_stand(adapted: tinker.SamplingClient) -> None:
    targets = np.full((len(PROBE) - 1, 2), -1, dtype=np.int64)
    targets[:, 0] = PROBE[1:]
    answer = wait(
        adapted.sample(
            prompt(PROBE),
            1,
            types.SamplingParams(max_tokens=1),
            include_prompt_logprobs=True,
            target_prompt_logprobs=types.TensorData.from_numpy(targets),
        )
    )
    scored = answer.target_prompt_logprobs.to_numpy()
    assert_same(scored[:, 0].astype(np.float64), np.array(answer.prompt_logprobs[1:]))
    assert not scored[:, 1].any()


def test_only_the_last_prompt_logprobs_come_when_only_those_are_asked_for(
    adapted: tinker.SamplingClient,
) -> None:
    answer = wait(
        adapted.sample(
            prompt(PROBE),
            1,
            types.SamplingParams(max_tokens=1),
            include_prompt_logprobs=True,
            prompt_logprobs_last_n=5,
        )
    )
    assert answer.prompt_logprobs[:-5] == [None] * (len(PROBE) - 5)
    assert_same(np.array(answer.prompt_logprobs[-5:]), sampler_fingerprint(adapted)[-5:])


# ---------------------------------------------------------------- length


def test_without_max_tokens_a_sample_ends_at_the_context(base: tinker.SamplingClient) -> None:
    tokens = text(1, MAX_CONTEXT_LENGTH - 40)
    sampled = wait(base.sample(prompt(tokens), 1, types.SamplingParams(stop=[]))).sequences[0]
    assert len(sampled.tokens) == 40
    assert sampled.stop_reason == "length"


def test_max_tokens_beyond_the_context_is_cut_to_it(base: tinker.SamplingClient) -> None:
    sampled = generate(base, text(1, MAX_CONTEXT_LENGTH - 10), 10_000, stop=[])
    assert (len(sampled.tokens), sampled.stop_reason) == (10, "length")


def test_a_prompt_of_one_token_is_enough(base: tinker.SamplingClient) -> None:
    assert len(generate(base, [65], 5, stop=[]).tokens) == 5
    assert np.isnan(wait(base.compute_logprobs(prompt([65])))[0] or np.nan)


# ---------------------------------------------------------------- which weights


def test_a_sampler_is_a_snapshot(service: tinker.ServiceClient) -> None:
    """public-reports E65, issue 2 item 6"""
    run = new_run(service, seed=22)
    train(run, 1)
    first = sampler_of(run)
    before, greedy = sampler_fingerprint(first), generate(first, PROBE, 20, temperature=0.0)
    train(run, 5)
    second = sampler_of(run)
    assert_same(sampler_fingerprint(first), before, 1e-6)
    assert generate(first, PROBE, 20, temperature=0.0).tokens == greedy.tokens
    assert not same(sampler_fingerprint(second), before, 0.01)
    assert_same(sampler_fingerprint(second), fingerprint(run))


def test_an_inflight_sampler_follows_the_later_inflight_saves(
    service: tinker.ServiceClient,
) -> None:
    """Protocol 8.8: a later save reaches the clients there are; a new client never sees weights
    older than its save; a snapshot in between changes nothing."""
    run = new_run(service, seed=23)
    first = sampler_of(run, kind="inflight")
    for _ in range(3):
        train(run, 1)
        snapshot = sampler_of(run)
        new = sampler_of(run, kind="inflight")
        trainer = fingerprint(run)
        assert_same(sampler_fingerprint(new), trainer)
        assert_same(sampler_fingerprint(first), trainer)
        train(run, 1)
        assert_same(sampler_fingerprint(first), trainer)
        assert_same(sampler_fingerprint(snapshot), trainer)


def test_inflight_samplers_of_two_runs_are_strangers(service: tinker.ServiceClient) -> None:
    one, other = new_run(service, seed=24), new_run(service, seed=25)
    train(one, 2)
    sampler = sampler_of(one, kind="inflight")
    expected = fingerprint(one)
    train(other, 2, [sft(text(77))])
    sampler_of(other, kind="inflight")
    assert_same(sampler_fingerprint(sampler), expected)


def test_adapters_are_not_mixed_up_by_the_prefix_cache(service: tinker.ServiceClient) -> None:
    """public-reports F69: one name saved by two runs, one long shared prompt, asked in turn."""
    tokens = text(8, 300)
    samplers, trainers = [], []
    for seed, target in ((26, 66), (27, 67)):
        run = new_run(service, seed=seed)
        train(run, 12, [sft([*PROBE, *[target] * 12])])
        path = wait(run.save_weights_for_sampler("shared-name")).path
        samplers.append(wait(service.create_sampling_client(model_path=path)))
        trainers.append(run)
    for _ in range(2):
        for sampler, run in zip(samplers, trainers, strict=True):
            assert_same(sampler_fingerprint(sampler, tokens), fingerprint(run, tokens), 1e-3)
    for sampler, target in zip(samplers, (66, 67), strict=True):
        assert set(generate(sampler, PROBE, 8, temperature=0.0).tokens) == {target}


def test_generation_is_undisturbed_by_adapters_that_arrive_meanwhile(
    service: tinker.ServiceClient,
) -> None:
    """public-reports F72: two long decodes at T = 0 while eight new samplers are made and used."""
    samplers = []
    for seed in (28, 29):
        run = new_run(service, seed=seed, rank=4)
        train(run, 2, [sft(text(seed))])
        samplers.append(sampler_of(run))
    quiet = [generate(s, PROBE, 200, temperature=0.0, stop=[]).tokens for s in samplers]
    params = types.SamplingParams(max_tokens=200, temperature=0.0, stop=[])
    running = [s.sample(prompt(PROBE), 1, params) for s in samplers]
    newcomer = new_run(service, seed=30)
    for seed in range(8):
        train(newcomer, 1, [sft(text(seed))])
        generate(sampler_of(newcomer), PROBE, 3)
    assert [wait(future).sequences[0].tokens for future in running] == quiet


def test_two_hundred_samples_of_many_adapters_at_once_are_each_its_own(
    service: tinker.ServiceClient, base: tinker.SamplingClient
) -> None:
    """from-users 8, 15, 16, public-reports F76: ranks 1 to 64, other flags, and the base model;
    none waits for ever, and each answers from its own weights, twice."""
    flags: list[dict[str, Any]] = [
        {"rank": 1},
        {"rank": 4, "train_unembed": False},
        {"rank": 16, "train_mlp": False},
        {"rank": 64, "train_attn": False},
        {"rank": 8, "train_mlp": False, "train_unembed": False},
        {"rank": 32},
        {"rank": 2, "train_attn": False, "train_mlp": False},
        {"rank": 3},
        {"rank": 5},
        {"rank": 6},
    ]
    samplers, expected = [base], [sampler_fingerprint(base)]
    for seed, options in enumerate(flags):
        run = new_run(service, seed=seed, **options)
        train(run, 2, [sft(text(seed))])
        samplers.append(sampler_of(run))
        expected.append(fingerprint(run))
    for _ in range(2):
        futures = [
            (index, sampler.compute_logprobs(prompt(PROBE)))
            for _ in range(9)
            for index, sampler in enumerate(samplers)
        ]
        for index, future in futures:
            assert_same(np.array(wait(future)[1:]), expected[index], 1e-3)


# ---------------------------------------------------------------- clients of samplers


def test_a_pickled_sampler_samples_the_same_weights_with_numbers_of_its_own(
    adapted: tinker.SamplingClient,
) -> None:
    copies = [pickle.loads(pickle.dumps(adapted)) for _ in range(2)]
    futures = [
        sampler.sample(prompt(PROBE), 1, types.SamplingParams(max_tokens=8, temperature=0.0))
        for sampler in (adapted, *copies)
        for _ in range(3)
    ]
    answers = [wait(future).sequences[0] for future in futures]
    assert len({tuple(answer.tokens) for answer in answers}) == 1
    assert len({answer.sequence_id for answer in answers}) == len(answers)


def test_a_sample_sent_again_is_the_same_sample(raw: Raw) -> None:
    """public-reports A4"""
    body = {"session_id": raw.session(), "sampling_session_seq_id": 0, "base_model": MODEL}
    sampler = raw.post("create_sampling_session", body).json()["sampling_session_id"]
    body = {
        "sampling_session_id": sampler,
        "seq_id": 0,
        "num_samples": 2,
        "prompt": {"chunks": [{"type": "encoded_text", "tokens": PROBE}]},
        "sampling_params": {"max_tokens": 12},
    }
    answers = [raw.post("asample", body).json() for _ in range(5)]
    assert all(answer == answers[0] for answer in answers)
    results = {raw.outcome(answer["request_id"]).content for answer in answers}
    assert len(results) == 1
    target = {"sampling_session_id": sampler}
    poll = raw.post("retrieve_futures", {"target": target, "timeout": 0}).json()
    assert [one["request_id"] for one in poll["completions"]] == [answers[0]["request_id"]]


def test_a_cancelled_sample_stops_and_frees_the_engine(raw: Raw) -> None:
    """64 continuations to the end of the context would take the engine far longer than this."""
    body = {"session_id": raw.session(), "sampling_session_seq_id": 0, "base_model": MODEL}
    sampler = raw.post("create_sampling_session", body).json()["sampling_session_id"]

    def ask(seq: int, num_samples: int, **params: Any) -> str:
        return raw.promise(
            "asample",
            {
                "sampling_session_id": sampler,
                "seq_id": seq,
                "num_samples": num_samples,
                "prompt": {"chunks": [{"type": "encoded_text", "tokens": PROBE}]},
                "sampling_params": {"stop": [], **params},
            },
        )

    long = [ask(seq, 64) for seq in range(4)]
    time.sleep(0.3)
    started = time.monotonic()
    for request in long:
        assert raw.post("cancel_future", {"request_id": request}).is_success
    for request in long:
        assert "error" in raw.outcome(request).json()
    raw.outcome(ask(9, 1, max_tokens=4))
    assert time.monotonic() - started < 5
    assert raw.post("cancel_future", {"request_id": long[0]}).is_success


def test_a_finished_sample_stays_as_it_is_when_cancelled(raw: Raw) -> None:
    body = {"session_id": raw.session(), "sampling_session_seq_id": 0, "base_model": MODEL}
    sampler = raw.post("create_sampling_session", body).json()["sampling_session_id"]
    request = raw.promise(
        "asample",
        {
            "sampling_session_id": sampler,
            "seq_id": 0,
            "prompt": {"chunks": [{"tokens": PROBE}]},
            "sampling_params": {"max_tokens": 4},
        },
    )
    first = raw.outcome(request).content
    assert raw.post("cancel_future", {"request_id": request}).is_success
    assert raw.outcome(request).content == first


def test_a_sampler_outlives_its_checkpoint(
    service: tinker.ServiceClient, rest: tinker.RestClient, trained: tinker.TrainingClient
) -> None:
    """Who samples already is not cut off by a delete; who comes later finds nothing."""
    path = wait(trained.save_weights_for_sampler("to-be-deleted")).path
    sampler = wait(service.create_sampling_client(model_path=path))
    wait(rest.delete_checkpoint_from_tinker_path(path))
    assert_same(sampler_fingerprint(sampler), fingerprint(trained))
    with refused("does not exist"):
        wait(service.create_sampling_client(model_path=path))


def test_a_finished_session_takes_no_more_work(server: RunningServer, raw: Raw) -> None:
    """Protocol 3.6. (The SDK itself stops sending; another process of its user would not know.)"""
    client = tinker.ServiceClient(base_url=server.url, api_key=server.keys["alice"])
    sampler = wait(client.create_sampling_client(base_model=MODEL))
    run = new_run(client)
    generate(sampler, PROBE, 2)
    wait(client.close("success"))
    session = run.model_id.split(":")[0]
    body = {"prompt": {"chunks": [{"tokens": PROBE}]}, "seq_id": 50}
    refusals = [
        raw.post("asample", {**body, "sampling_session_id": f"{session}:sample:0"}),
        raw.post("forward_backward", pass_body(run.model_id, 50), headers=PROTOBUF),
        raw.post("session_heartbeat", {"session_id": session}),
        raw.post("create_model", {"session_id": session, "model_seq_id": 7, "base_model": MODEL}),
    ]
    for refusal in refusals:
        assert refusal.status_code == 410
        assert "finished" in refusal.json()["detail"]


def test_a_sampler_whose_files_are_gone_says_so(
    service: tinker.ServiceClient,
    rest: tinker.RestClient,
    trained: tinker.TrainingClient,
    server: RunningServer,
) -> None:
    """Its checkpoint was deleted a while ago, before it ever sampled: no sample hangs."""
    before = {folder.name for folder in (server.data / "weights").iterdir()}
    path = wait(trained.save_weights_for_sampler("vanishing")).path
    [folder] = {folder.name for folder in (server.data / "weights").iterdir()} - before
    sampler = wait(service.create_sampling_client(model_path=path))
    wait(rest.delete_checkpoint_from_tinker_path(path))
    shutil.rmtree(server.data / "weights" / folder)
    started = time.monotonic()
    with pytest.raises(tinker.TinkerError):
        generate(sampler, PROBE, 4)
    assert time.monotonic() - started < 10
