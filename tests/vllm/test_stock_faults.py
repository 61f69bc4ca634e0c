"""What vLLM's own CPU LoRA path gets wrong; test_parity.py shows the same requests cured."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from backends.sampling.vllm.adapters import BASE
from backends.sampling.vllm.answer import Answer
from backends.sampling.vllm.client import ReplicaClient
from backends.sampling.vllm.errors import ReplicaLost
from tests.unit.sampling.material import logprobs, reference
from tests.vllm.material import in_one_step, prompt, settings, start_server

pytestmark = pytest.mark.asyncio(loop_scope="session")


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def stock(
    base_path: Path, adapters: list[str], tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[ReplicaClient]:
    """A server that loads no plugin, with an adapter in each of its two slots."""
    log_file = tmp_path_factory.mktemp("stock") / "log"
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VLLM_PLUGINS", "none")
        server = await start_server(settings(base_path, max_loras=2), log_file)()
    client = ReplicaClient(server.url)
    for i in range(2):
        await client.load_adapter(f"a{i}", adapters[2 * i])
    yield client
    await client.close()
    await server.stop()


def call(client: ReplicaClient, model: str, seed: int, **params: int):
    sampling = {"max_tokens": 1, "temperature": 0.0, "logprobs": 0, "detokenize": False}
    tokens = prompt(14 + seed, seed).tolist()
    body = {"model": model, "token_ids": tokens, "sampling_params": sampling | params}
    return client.generate(body)


def error(base_path: Path, adapter: str | None, seed: int, answer: Answer) -> float:
    """How far the sampled token's logprob is from the truth about that token."""
    position = answer.choices[0].logprobs.content[0]
    rows = logprobs(reference(base_path, adapter), prompt(14 + seed, seed))
    return abs(position.logprob - rows[-1, position.token_id].item())


async def test_rows_without_an_adapter_get_anothers_weights(
    stock: ReplicaClient, base_path: Path, adapters: list[str]
):
    for model in (BASE, "a0", "a1"):
        await call(stock, model, 0)
    found = await in_one_step(stock, [call(stock, m, s) for s, m in enumerate((BASE, "a0", "a1"))])
    assert error(base_path, adapters[0], 1, found[1]) < 1e-3
    assert error(base_path, adapters[2], 2, found[2]) < 1e-3
    assert error(base_path, None, 0, found[0]) > 0.01


async def test_prompt_logprobs_of_two_requests_in_a_step_end_the_engine(stock: ReplicaClient):
    """The last test of this server."""
    calls = [call(stock, m, s, prompt_logprobs=0) for s, m in enumerate(("a0", "a1"))]
    with pytest.raises(ReplicaLost):
        await in_one_step(stock, calls)
