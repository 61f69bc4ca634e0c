"""In-flight weights: replaced under requests that go on, and under nobody else's."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from backends.contract import SampleDelta, SampleRequest, SampleResult
from backends.sampling.embedded import EmbeddedEngine
from backends.sampling.vllm.engine import VllmEngine
from tests.unit.sampling.material import result as embedded_result
from tests.vllm.material import prompt, request, result

pytestmark = pytest.mark.asyncio(loop_scope="session")

LONG = 300
NAMESPACE = "sampler"


def pushing(folder: Path, like: str, one: int, other: int) -> str:
    """An adapter of the head alone, under which nothing but two tokens is ever sampled: what the
    hidden state adds to one, it takes from the other."""
    folder.mkdir()
    (head,) = {
        name
        for name in load_file(Path(like) / "adapter_model.safetensors")
        if "lm_head" in name and "lora_B" in name
    }
    tensors = load_file(Path(like) / "adapter_model.safetensors")
    b = np.zeros_like(tensors[head])
    b[one], b[other] = 1000.0, -1000.0
    save_file({**tensors, head: b}, folder / "adapter_model.safetensors")
    (folder / "adapter_config.json").write_text((Path(like) / "adapter_config.json").read_text())
    return str(folder)


@pytest.fixture(scope="session")
def versions(tmp_path_factory: pytest.TempPathFactory, adapters: list[str]) -> list[str]:
    """Of one run: weights as they come, then two that each sample two tokens alone."""
    root = tmp_path_factory.mktemp("versions")
    head = adapters[4]
    return [adapters[0], pushing(root / "1", head, 10, 11), pushing(root / "2", head, 20, 21)]


def inflight(name: str, adapter: str, **fields: object) -> SampleRequest:
    fields = {"max_tokens": LONG, "adapter": adapter, "cache_namespace": NAMESPACE} | fields
    return request(name, prompt(10), **fields)


class Reader:
    """Reads a stream to its end, and tells when so many tokens have come."""

    def __init__(self, parts: AsyncGenerator) -> None:
        self.tokens: list[int] = []
        self.result: SampleResult | None = None
        self._grown = asyncio.Condition()
        self.task = asyncio.create_task(self._read(parts))

    async def until(self, count: int) -> None:
        async with self._grown:
            await self._grown.wait_for(lambda: len(self.tokens) >= count)

    async def _read(self, parts: AsyncGenerator) -> None:
        async with aclosing(parts):
            async for part in parts:
                if isinstance(part, SampleDelta):
                    async with self._grown:
                        self.tokens += part.tokens.tolist()
                        self._grown.notify_all()
                else:
                    assert isinstance(part, SampleResult), part
                    self.result = part


async def test_what_runs_goes_on_with_the_newest_weights_and_nobody_else_notices(
    engine: VllmEngine, embedded: EmbeddedEngine, versions: list[str], adapters: list[str]
):
    others = [
        request("other", prompt(12, seed=1), adapter=adapters[1], max_tokens=LONG),
        request("base", prompt(12, seed=2), max_tokens=LONG),
    ]
    waiting = [asyncio.create_task(engine.sample(one)) for one in others]
    reader = Reader(engine.stream(inflight("long", versions[0])))
    seen = []
    for old, new in pairwise(versions):
        seen.append(len(reader.tokens) + 5)
        await reader.until(seen[-1])
        await engine.update(old, new)
        seen[-1] = len(reader.tokens)
    await reader.until(seen[-1] + 20)
    await reader.task
    assert not any(task.cancelled() for task in waiting)

    first = embedded_result(embedded, inflight("first", versions[0])).sequences[0].tokens.tolist()
    assert len(reader.tokens) == LONG
    assert reader.tokens[:5] == first[:5]
    # What came before the answer to `update` may be older by the steps that were on their way.
    assert set(reader.tokens[seen[0] + 3 : seen[1] - 3]) <= {10, 11}
    assert set(reader.tokens[seen[1] + 3 :]) <= {20, 21}
    for one, task in zip(others, waiting, strict=True):
        got = await task
        assert isinstance(got, SampleResult), got
        expected = embedded_result(embedded, one).sequences[0].tokens.tolist()
        assert got.sequences[0].tokens.tolist() == expected
    assert not set(versions[:2]) & engine.fleet.replicas[0].adapters.folders


async def test_a_prefix_that_older_weights_have_read_is_never_used_again(
    engine: VllmEngine, embedded: EmbeddedEngine, versions: list[str], adapters: list[str]
):
    tokens = prompt(200, seed=3)
    old, new = adapters[0], adapters[2]
    fields = {"max_tokens": 4, "cache_namespace": "other sampler"}
    asked = [request(f"r{i}", tokens, adapter=old, **fields) for i in range(2)]
    hits = [(await result(engine, one)).prompt_cache_hit_tokens for one in asked]
    assert hits == [0, 128]
    reader = Reader(
        engine.stream(request("long", tokens, adapter=old, **fields | {"max_tokens": LONG}))
    )
    await reader.until(3)
    await engine.update(old, new)
    for number, hit in enumerate((0, 128)):
        one = request(f"n{number}", tokens, adapter=new, **fields)
        got = await result(engine, one)
        assert got.prompt_cache_hit_tokens == hit
        expected = embedded_result(embedded, one).sequences[0]
        assert got.sequences[0].tokens.tolist() == expected.tokens.tolist()
        np.testing.assert_allclose(got.sequences[0].logprobs, expected.logprobs, atol=1e-3)
    await reader.task


async def test_one_that_still_names_the_old_weights_gets_the_new_ones(
    engine: VllmEngine, embedded: EmbeddedEngine, versions: list[str]
):
    """It was on its way to the replica when they were replaced there."""
    reader = Reader(engine.stream(inflight("long", versions[0])))
    await reader.until(3)
    await engine.update(versions[0], versions[1])
    late = await result(engine, inflight("late", versions[0], max_tokens=8))
    assert set(late.sequences[0].tokens.tolist()) <= {10, 11}
    await reader.task
