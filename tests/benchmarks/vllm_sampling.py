"""Samples through the service, over the same samples asked of its vLLM replica directly.

Both sides send the same prompts at once to the same server and wait for every answer; the service's
is the SDK, start to end, on the same cores.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence

import aiohttp
import numpy as np
import tinker
from tinker import types

from server.live import LiveServer
from tests.benchmarks.measure import in_turn, wall_seconds
from tests.benchmarks.report import Row, ratio_row
from tests.benchmarks.scale import MODEL_NAME, Scale
from tests.benchmarks.served import client, serving
from tests.running_server import RunningServer
from tests.vllm.material import PYTHON

CONCURRENT = 32
PROMPT_TOKENS = 64
NEW_TOKENS = 32
SHARE = 0.95
"""Of the direct tokens/s that the service must reach."""

Prompts = Sequence[Sequence[int]]


def available() -> bool:
    """Whether `make install-vllm` was run."""
    return PYTHON.exists()


def rows(scale: Scale) -> Iterator[Row]:
    prompts = np.random.default_rng(0).integers(100, 1000, (CONCURRENT, PROMPT_TOKENS)).tolist()
    options = ("--engine", "vllm", "--replicas", "1")
    with (
        serving({MODEL_NAME: scale.model}, scale.threads, options=options) as server,
        client(server) as service,
    ):
        sampler = service.create_sampling_client(base_model=MODEL_NAME).result()
        url = _replica_url(server)
        through, direct = in_turn(
            [
                lambda: wall_seconds(lambda: _through_the_service(sampler, prompts)),
                lambda: wall_seconds(lambda: asyncio.run(_directly(url, prompts))),
            ],
            scale.rounds,
        )
    yield ratio_row(
        "sampling-over-direct",
        f"{CONCURRENT} samples through the service / of its vLLM replica directly",
        over=through,
        under=direct,
        target=1 / SHARE,
    )


def _replica_url(server: RunningServer) -> str:
    live = LiveServer.find(server.data)
    assert live is not None
    (replica,) = live.get("replicas")
    return replica["url"]


def _through_the_service(sampler: tinker.SamplingClient, prompts: Prompts) -> None:
    params = types.SamplingParams(max_tokens=NEW_TOKENS, temperature=1.0, stop=[])
    futures = [sampler.sample(types.ModelInput.from_ints(list(p)), 1, params) for p in prompts]
    for future in futures:
        (sequence,) = future.result().sequences
        assert len(sequence.tokens) == len(sequence.logprobs or ()) == NEW_TOKENS


async def _directly(url: str, prompts: Prompts) -> None:
    connector = aiohttp.TCPConnector(limit=0)
    timeout = aiohttp.ClientTimeout(total=None)
    async with aiohttp.ClientSession(url, connector=connector, timeout=timeout) as session:
        await asyncio.gather(*(_generated(session, prompt) for prompt in prompts))


async def _generated(session: aiohttp.ClientSession, prompt: Sequence[int]) -> None:
    sampling = {"max_tokens": NEW_TOKENS, "temperature": 1.0, "logprobs": 0}
    sampling |= {"ignore_eos": True, "detokenize": False}
    body = {"model": "base", "token_ids": prompt, "sampling_params": sampling}
    async with session.post("/inference/v1/generate", json=body) as response:
        (choice,) = (await response.json())["choices"]
        assert len(choice["token_ids"]) == len(choice["logprobs"]["content"]) == NEW_TOKENS
