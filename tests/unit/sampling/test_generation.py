from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from backends.contract import Failure, SampleResult
from backends.model import FrozenModel
from backends.sampling.embedded import EmbeddedEngine
from tests.tiny_models import MAX_CONTEXT_LENGTH, VOCAB_SIZE, tiny_qwen3
from tests.unit.sampling.material import (
    MakeEngine,
    greedy,
    logprobs,
    outcomes,
    prompt,
    reference,
    request,
    result,
)

LENGTHS = (1, 5, 17, 70)


def test_greedy_tokens_are_those_of_transformers_and_peft(make_engine, base_path, adapters):
    for adapter in (None, *adapters):
        model = reference(base_path, adapter)
        for length in LENGTHS:
            tokens = prompt(length, seed=length)
            got = result(make_engine(), request("r", tokens, adapter=adapter, max_tokens=70))
            assert got.sequences[0].tokens.tolist() == greedy(model, tokens, 70)


def test_adapters_of_different_rank_and_the_base_share_a_batch(make_engine, base_path, adapters):
    cases = {
        f"{adapter}:{length}": (adapter, prompt(length, seed=length))
        for length in LENGTHS
        for adapter in (None, *adapters)
    }
    found = outcomes(
        make_engine(prefill_chunk_tokens=32),
        *(request(n, t, adapter=a, max_tokens=70) for n, (a, t) in cases.items()),
    )
    models = {adapter: reference(base_path, adapter) for adapter in (None, *adapters)}
    for name, (adapter, tokens) in cases.items():
        got = found[name].sequences[0].tokens.tolist()
        assert got == greedy(models[adapter], tokens, 70), name


def test_another_architecture_works_the_same(tmp_path: Path, tokenizer):
    path = tiny_qwen3(tmp_path)
    model = FrozenModel.load(path, torch.float32, torch.device("cpu"))
    tokens = prompt(40)
    engine = EmbeddedEngine(model, tokenizer, prefill_chunk_tokens=16)
    got = result(engine, request("r", tokens, max_tokens=30))
    assert got.sequences[0].tokens.tolist() == greedy(reference(path, None), tokens, 30)


def test_every_sample_continues_the_whole_prompt(make_engine: MakeEngine, base_path):
    tokens = prompt(30)
    expected = greedy(reference(base_path, None), tokens, 80)
    for batch_size in (1, 3, 32):
        engine = make_engine(max_batch_size=batch_size)
        got = result(engine, request("r", tokens, num_samples=5, max_tokens=80))
        assert [s.tokens.tolist() for s in got.sequences] == [expected] * 5


def test_samples_that_part_keep_their_own_past(make_engine: MakeEngine, base_path, adapters):
    tokens = prompt(20)
    got = result(
        make_engine(),
        request("r", tokens, adapter=adapters[0], num_samples=6, max_tokens=90, temperature=1.0),
    )
    model = reference(base_path, adapters[0])
    assert len({tuple(s.tokens) for s in got.sequences}) == 6
    for sequence in got.sequences:
        whole = np.concatenate([tokens, sequence.tokens.astype(np.int64)])
        rows = logprobs(model, whole)[len(tokens) - 1 : -1]
        expected = rows.gather(1, torch.from_numpy(whole[len(tokens) :])[:, None])[:, 0]
        np.testing.assert_allclose(sequence.logprobs, expected.numpy(), atol=1e-4)


def test_logprobs_are_the_models_own_whatever_the_filters(make_engine: MakeEngine, base_path):
    tokens = prompt(12)
    filters = {"temperature": 0.3, "top_k": 3, "top_p": 0.5, "topk_sample_logprobs": 4}
    sequence = result(make_engine(), request("r", tokens, **filters)).sequences[0]
    whole = np.concatenate([tokens, sequence.tokens.astype(np.int64)])
    rows = logprobs(reference(base_path, None), whole)[11:-1]
    own = rows.gather(1, torch.from_numpy(whole[12:])[:, None])[:, 0]
    np.testing.assert_allclose(sequence.logprobs, own.numpy(), atol=1e-4)
    np.testing.assert_allclose(sequence.topk.logprobs, rows.topk(4).values.numpy(), atol=1e-4)
    assert sequence.topk.token_ids.tolist() == rows.topk(4).indices.tolist()
    assert sequence.topk.token_ids.dtype == np.int32


def test_a_sequence_ends_at_max_tokens_or_at_the_context_window(make_engine: MakeEngine):
    short = result(make_engine(), request("r", prompt(9), max_tokens=7)).sequences[0]
    assert (len(short.tokens), short.stop_reason) == (7, "length")
    tokens = prompt(MAX_CONTEXT_LENGTH - 3)
    bound = result(make_engine(), request("r", tokens, max_tokens=1000)).sequences[0]
    assert (len(bound.tokens), bound.stop_reason) == (3, "length")
    full = request("r", prompt(MAX_CONTEXT_LENGTH), num_samples=2, topk_sample_logprobs=2)
    for sequence in result(make_engine(), full).sequences:
        assert (len(sequence.tokens), sequence.stop_reason) == (0, "length")


def test_a_long_prompt_does_not_stop_the_others(make_engine: MakeEngine):
    engine = make_engine(prefill_chunk_tokens=10)
    engine.add(request("short", prompt(5), max_tokens=30))
    engine.step()
    engine.add(request("long", prompt(400), max_tokens=1))
    finished = [name for _ in range(45) for name, _ in engine.step()]
    assert finished == ["short", "long"]


def test_a_request_that_can_never_fit_says_so_and_the_rest_take_turns(make_engine: MakeEngine):
    engine = make_engine(kv_token_budget=100)
    requests = [request(str(i), prompt(20, seed=i), max_tokens=30, num_samples=3) for i in range(6)]
    found = outcomes(engine, request("big", prompt(60), max_tokens=50), *requests)
    failure = found.pop("big")
    assert isinstance(failure, Failure)
    assert failure.category == "user"
    assert "169 tokens" in failure.message
    assert "100" in failure.message
    alone = {r.request_id: result(make_engine(), r) for r in requests}
    for name, got in found.items():
        assert isinstance(got, SampleResult)
        assert [s.tokens.tolist() for s in got.sequences] == [
            s.tokens.tolist() for s in alone[name].sequences
        ]


def test_what_is_finished_holds_no_room_but_cached_prompts(make_engine: MakeEngine):
    engine = make_engine(kv_token_budget=400)
    requests = [
        request(str(i), prompt(30 + i, seed=i), max_tokens=40, num_samples=1 + i % 3)
        for i in range(12)
    ]
    outcomes(engine, *requests)
    cache = engine._schedule.cache
    assert cache.free_tokens == 400 - sum(len(entry.tokens) for entry in cache._entries)
    assert engine._schedule.rows.slabs == []
    assert cache.reserve(400)


def test_a_cancelled_request_stops_and_the_others_do_not_notice(make_engine: MakeEngine):
    engine = make_engine(kv_token_budget=300)
    kept = request("kept", prompt(10), max_tokens=60)
    engine.add(request("running", prompt(10, seed=1), max_tokens=60, num_samples=2))
    engine.add(kept)
    engine.add(request("waiting", prompt(60, seed=2), max_tokens=100))
    for _ in range(5):
        assert engine.step() == []
    engine.cancel("running")
    engine.cancel("waiting")
    engine.cancel("unknown")
    failures = dict(engine.step())
    assert set(failures) == {"running", "waiting"}
    cancelled = Failure(message="cancelled by the client", category="user")
    assert set(failures.values()) == {cancelled}
    rest = outcomes(engine)
    expected = result(make_engine(), kept).sequences[0].tokens
    assert rest["kept"].sequences[0].tokens.tolist() == expected.tolist()
    assert engine._schedule.cache.reserve(300)


def test_a_prompt_can_be_cancelled_while_it_is_read(make_engine: MakeEngine):
    engine = make_engine(prefill_chunk_tokens=8, kv_token_budget=300)
    engine.add(request("r", prompt(50), num_samples=2))
    engine.step()
    engine.cancel("r")
    assert [name for name, _ in engine.step()] == ["r"]
    assert not engine.busy
    assert engine._schedule.cache.free_tokens == 300


def test_a_missing_adapter_fails_its_own_request(make_engine: MakeEngine, tmp_path: Path):
    missing = str(tmp_path / "nowhere")
    found = outcomes(
        make_engine(), request("bad", prompt(5), adapter=missing), request("good", prompt(5))
    )
    assert isinstance(found["good"], SampleResult)
    assert found["bad"].category == "server"
    assert missing in found["bad"].message


@pytest.mark.parametrize(
    ("fields", "word"),
    [
        ({"prompt": np.array([VOCAB_SIZE])}, "outside"),
        ({"prompt": np.array([-1])}, "outside"),
        ({"prompt": np.zeros(0, np.int64)}, "0 tokens"),
        ({"prompt": np.zeros(MAX_CONTEXT_LENGTH + 1, np.int64)}, "513"),
        ({"prompt": np.zeros(3)}, "float64"),
        ({"num_samples": 0}, "num_samples"),
        ({"temperature": float("nan")}, "temperature"),
        ({"topk_prompt_logprobs": VOCAB_SIZE + 1}, "top-k"),
        ({"topk_sample_logprobs": -1}, "top-k"),
        ({"target_prompt_tokens": np.zeros((5, 1), np.int64)}, "target_prompt_tokens"),
        ({"target_prompt_tokens": np.full((4, 1), VOCAB_SIZE)}, "target_prompt_tokens"),
    ],
)
def test_bad_input_is_refused_in_one_sentence(make_engine: MakeEngine, fields, word):
    fields = {"prompt": prompt(5)} | fields
    tokens = fields.pop("prompt")
    found = outcomes(make_engine(), request("bad", tokens, **fields), request("good", prompt(5)))
    assert found["bad"].category == "user"
    assert word in found["bad"].message
    assert isinstance(found["good"], SampleResult)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_weights_that_diverged_fail_their_own_request_alone(
    make_engine: MakeEngine, adapters: tuple[str, str], tmp_path: Path, temperature: float
):
    diverged = tmp_path / "diverged"
    shutil.copytree(adapters[0], diverged)
    file = diverged / "adapter_model.safetensors"
    save_file({name: t.fill_(float("nan")) for name, t in load_file(file).items()}, file)
    good = request("good", prompt(7), max_tokens=6)
    wild = {"adapter": str(diverged), "num_samples": 2, "temperature": temperature}

    together = outcomes(make_engine(), good, request("wild", prompt(7), **wild))

    assert isinstance(together["wild"], Failure)
    assert "nan" in together["wild"].message
    alone = result(make_engine(), good)
    assert isinstance(together["good"], SampleResult)
    assert together["good"].sequences[0].tokens.tolist() == alone.sequences[0].tokens.tolist()
