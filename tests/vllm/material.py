"""A tiny model that vLLM's CPU attention takes, adapters for it, engines over real servers."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from backends.contract import AdapterSpec, SampleRequest, SampleResult
from backends.lora.adapter import fresh_adapter
from backends.lora.peft_folder import save_adapter
from backends.model import FrozenModel
from backends.sampling.vllm.client import ReplicaClient
from backends.sampling.vllm.engine import VllmEngine
from backends.sampling.vllm.fleet import Fleet
from backends.sampling.vllm.launch import LaunchSettings, core_sets
from backends.sampling.vllm.model_facts import ModelFacts
from backends.sampling.vllm.process import LocalServer
from backends.sampling.vllm.replica import Replica
from backends.sampling.vllm.routing import choose
from backends.sampling.vllm.translate import Limits
from backends.sampling.vllm.warmup import write_idle_adapter
from tests.tiny_models import EOS_TOKEN_ID, MAX_CONTEXT_LENGTH, VOCAB_SIZE, with_tokenizer

T = TypeVar("T")

ROOT = Path(__file__).parents[2]
PYTHON = ROOT / ".venv-vllm" / "bin" / "python"
SMOLLM2 = ROOT / "models" / "HuggingFaceTB" / "SmolLM2-135M-Instruct"
MAX_NUM_SEQS = 16
ADAPTERS = (
    *("4 all", "9 attn", "32 all", "1 mlp", "8 head", "16 attn"),
    *("5 all", "20 all", "8 attn", "3 mlp"),
)
"""Rank, and which layers."""


def tiny_model(path: Path, *, tied: bool = True) -> Path:
    """A random Llama of 2 layers with heads of 32, the least that vLLM takes on a CPU."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=MAX_CONTEXT_LENGTH,
        bos_token_id=None,
        eos_token_id=EOS_TOKEN_ID,
        initializer_range=0.2,
        tie_word_embeddings=tied,
    )
    LlamaForCausalLM(config).save_pretrained(path)
    return with_tokenizer(path)


def write_adapter(model: FrozenModel, folder: Path, shape: str, *, std: float = 0.05) -> str:
    """A trained-looking adapter, saved as the trainer saves it. Gives the folder."""
    number, layers = shape.split()
    rank = int(number)
    spec = AdapterSpec(
        rank=rank,
        # Not a whole number for odd ranks.
        alpha=1.5 * rank,
        seed=rank,
        train_attn=layers in ("all", "attn"),
        train_mlp=layers in ("all", "mlp"),
        train_unembed=layers in ("all", "head"),
    )
    adapter = fresh_adapter(spec, model.targets, model.device)
    generator = torch.Generator().manual_seed(rank)
    for pair in adapter.pairs.values():
        pair.b.normal_(std=std, generator=generator)
    save_adapter(adapter, folder, "base")
    return str(folder)


def settings(model: Path, **changes: Any) -> LaunchSettings:
    fields = {
        "model": model,
        "python": PYTHON,
        "max_model_len": MAX_CONTEXT_LENGTH,
        "max_num_seqs": MAX_NUM_SEQS,
        "max_loras": 8,
        "max_cpu_loras": 8,
        "kv_cache_bytes": 100_000_000,
    }
    return LaunchSettings(**fields | changes)


def start_server(
    launch: LaunchSettings, log_file: Path, cores: Sequence[int] = (0,)
) -> Callable[[], Awaitable[LocalServer]]:
    return lambda: LocalServer.start(launch, cores, log_file)


async def started_engine(
    launch: LaunchSettings, folder: Path, *, replicas: int = 1, capacity: int = 6
) -> VllmEngine:
    idle = write_idle_adapter(launch.model, folder / "idle")
    available = sorted(os.sched_getaffinity(0))
    fleet = Fleet(
        [
            Replica(
                f"replica-{i}",
                start_server(launch, folder / f"replica-{i}.log", cores),
                adapter_capacity=capacity,
                warmup_adapter=idle,
            )
            for i, cores in enumerate(core_sets(available, replicas))
        ],
        choose,
    )
    await fleet.start()
    limits = Limits(max_num_seqs=launch.max_num_seqs, max_logprobs=launch.max_logprobs)
    return VllmEngine(fleet, ModelFacts.read(launch.model), limits)


def prompt(length: int, seed: int = 0, vocab_size: int = VOCAB_SIZE) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, vocab_size - 1, length)


def request(name: str, tokens: np.ndarray, **fields: Any) -> SampleRequest:
    fields = {"num_samples": 1, "max_tokens": 8, "temperature": 0.0} | fields
    return SampleRequest(request_id=name, prompt=tokens, **fields)


async def result(engine: VllmEngine, one: SampleRequest) -> SampleResult:
    outcome = await engine.sample(one)
    assert isinstance(outcome, SampleResult), outcome
    return outcome


async def in_one_step(client: ReplicaClient, calls: Sequence[Awaitable[T]]) -> list[T]:
    """Have the replica take up all the calls in the same step of its engine."""
    await client.pause("keep")
    running = asyncio.gather(*calls)
    await asyncio.sleep(1.0)  # the queue of a paused engine shows in no metric
    await client.resume()
    return await running


async def until(condition: Callable[[], bool]) -> None:
    """The test's own time limit ends what never comes true."""
    while not condition():  # noqa: ASYNC110 - replicas and requests tell nobody
        await asyncio.sleep(0.05)


def own_logprobs(rows: Tensor, tokens: np.ndarray) -> np.ndarray:
    """Of tokens[T], by rows[T, V] where row i comes after token i."""
    return rows[:-1].gather(1, torch.from_numpy(tokens[1:])[:, None])[:, 0].numpy()
