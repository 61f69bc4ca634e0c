"""The same numbers as transformers + peft, and as the embedded engine."""

from __future__ import annotations

import asyncio
from pathlib import Path

import numpy as np
import pytest
import torch

from backends.sampling.embedded import EmbeddedEngine
from backends.sampling.vllm.adapters import adapter_name
from backends.sampling.vllm.engine import VllmEngine
from tests.unit.sampling.material import logprobs, reference
from tests.unit.sampling.material import result as embedded_result
from tests.vllm.material import in_one_step, own_logprobs, prompt, request, result

pytestmark = pytest.mark.asyncio(loop_scope="session")


async def test_eight_adapters_and_the_base_in_one_step_score_as_peft_does(
    engine: VllmEngine, base_path: Path, adapters: list[str], embedded: EmbeddedEngine
):
    replica = engine.fleet.replicas[0]
    cases = [(None, prompt(12)), *((a, prompt(20 + i, seed=i)) for i, a in enumerate(adapters[:8]))]
    requests = [
        request(str(i), tokens, adapter=adapter, max_tokens=4, prompt_logprobs=True)
        for i, (adapter, tokens) in enumerate(cases)
    ]
    await asyncio.gather(*(result(engine, one) for one in requests))  # loads the adapters
    found = await in_one_step(replica.client, [result(engine, one) for one in requests])
    for (adapter, tokens), one, got in zip(cases, requests, found, strict=True):
        rows = logprobs(reference(base_path, adapter), tokens)
        expected = own_logprobs(rows, tokens)
        np.testing.assert_allclose(got.prompt_logprobs[1:], expected, atol=1e-3)
        inside = embedded_result(embedded, one)
        np.testing.assert_allclose(got.prompt_logprobs, inside.prompt_logprobs, atol=1e-3)
        sequence, other = got.sequences[0], inside.sequences[0]
        assert sequence.tokens.tolist() == other.tokens.tolist()
        np.testing.assert_allclose(sequence.logprobs, other.logprobs, atol=1e-3)


async def test_more_adapters_than_the_replica_holds(
    engine: VllmEngine, base_path: Path, adapters: list[str]
):
    tokens = prompt(15)
    for _ in range(2):
        found = await asyncio.gather(
            *(
                result(engine, request(f"{i}", tokens, adapter=a, prompt_logprobs=True))
                for i, a in enumerate(adapters)
            )
        )
        for adapter, got in zip(adapters, found, strict=True):
            rows = logprobs(reference(base_path, adapter), tokens)
            np.testing.assert_allclose(
                got.prompt_logprobs[1:], own_logprobs(rows, tokens), atol=1e-3
            )
    await result(engine, request("after", tokens, adapter=adapters[0]))
    held = engine.fleet.replicas[0].adapters.folders
    assert len(held) <= 6
    assert adapters[0] in held


async def test_an_adapter_that_vanished_from_the_replica_is_loaded_again(
    engine: VllmEngine, adapters: list[str]
):
    one = request("r", prompt(9), adapter=adapters[0])
    before = await result(engine, one)
    await engine.fleet.replicas[0].client.unload_adapter(adapter_name(adapters[0]))
    after = await result(engine, one)
    assert after.sequences[0].tokens.tolist() == before.sequences[0].tokens.tolist()


async def test_cached_prefixes_are_those_of_the_same_weights_and_namespace(
    engine: VllmEngine, base_path: Path, adapters: list[str]
):
    """vLLM keeps blocks of 128 tokens on a CPU."""
    tokens = prompt(300, seed=77)

    async def hits(adapter: str | None, namespace: str) -> int:
        one = request("r", tokens, adapter=adapter, cache_namespace=namespace, max_tokens=1)
        got = await result(engine, one)
        rows = logprobs(reference(base_path, adapter), tokens)
        assert got.sequences[0].tokens[0] == rows[-1].argmax()
        assert got.sequences[0].logprobs[0] == pytest.approx(rows[-1].max().item(), abs=1e-3)
        return got.prompt_cache_hit_tokens

    for adapter in (None, adapters[0], adapters[2]):
        for namespace in ("", "alice", "bob"):
            assert await hits(adapter, namespace) == 0
            assert await hits(adapter, namespace) == 256


async def test_samples_that_were_drawn_have_the_models_own_logprobs(
    engine: VllmEngine, base_path: Path, adapters: list[str]
):
    tokens = prompt(12)
    filters = {"temperature": 0.7, "top_k": 30, "top_p": 0.8, "topk_sample_logprobs": 4}
    one = request(
        "r", tokens, adapter=adapters[2], num_samples=20, max_tokens=10, seed=5, **filters
    )
    got = await result(engine, one)
    assert len({tuple(s.tokens) for s in got.sequences}) == 20
    model = reference(base_path, adapters[2])
    for sequence in got.sequences:
        whole = np.concatenate([tokens, sequence.tokens.astype(np.int64)])
        rows = logprobs(model, whole)
        np.testing.assert_allclose(sequence.logprobs, own_logprobs(rows, whole)[11:], atol=1e-3)
        best = rows[11:-1].topk(4)
        np.testing.assert_allclose(sequence.topk.logprobs, best.values.numpy(), atol=1e-3)
        assert sequence.topk.token_ids.tolist() == best.indices.tolist()
        for row, token in zip(rows[11:-1], sequence.tokens, strict=True):
            assert token in _kept(row, temperature=0.7, top_k=30, top_p=0.8)


def _kept(row: torch.Tensor, *, temperature: float, top_k: int, top_p: float) -> list[int]:
    """The tokens that the filters leave of a distribution."""
    best = (row / temperature).topk(top_k)
    before = best.values.softmax(-1).cumsum(-1) - best.values.softmax(-1)
    return best.indices[before < top_p + 1e-4].tolist()
