"""How a vLLM server of ours is started: its command line and its environment."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from backends.sampling.vllm.adapters import BASE

_LORA_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""What vLLM takes for `--max-lora-rank`."""


def lora_rank_limit(rank: int) -> int:
    """The smallest limit under which adapters of this rank can be loaded. Raises ValueError."""
    for limit in _LORA_RANKS:
        if rank <= limit:
            return limit
    raise ValueError(f"vLLM takes adapters up to rank {_LORA_RANKS[-1]}, not {rank}")


def core_sets(cores: Sequence[int], replicas: int) -> list[tuple[int, ...]]:
    """Which cores each replica runs on: their own as far as there are enough."""
    size = max(1, len(cores) // replicas)
    return [tuple(cores[(i * size + j) % len(cores)] for j in range(size)) for i in range(replicas)]


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchSettings:
    """Of every replica that serves one base model."""

    model: Path
    python: Path
    """The interpreter of an environment with vLLM in it (`make install-vllm`)."""
    max_model_len: int
    dtype: str = "float32"
    max_num_seqs: int = 32
    max_loras: int = 4
    """Adapters in one batch."""
    max_cpu_loras: int = 16
    """Adapters that stay in memory."""
    max_lora_rank: int = 32
    max_logprobs: int = 101
    """A sample's k best need k + 1."""
    kv_cache_bytes: int | None = None
    """None leaves it to vLLM, which takes most of the memory there is."""
    gpu_memory_utilization: float | None = None
    """Share of each GPU; None leaves it to vLLM."""
    devices: str | None = None
    """CUDA_VISIBLE_DEVICES; None is what this process sees."""
    on_cpu: bool = True


def command(settings: LaunchSettings, port: int) -> list[str]:
    options: dict[str, object] = {
        "--model": settings.model.absolute(),
        "--served-model-name": BASE,
        "--host": "127.0.0.1",
        "--port": port,
        "--dtype": settings.dtype,
        "--max-model-len": settings.max_model_len,
        "--max-num-seqs": settings.max_num_seqs,
        "--max-loras": settings.max_loras,
        "--max-cpu-loras": max(settings.max_cpu_loras, settings.max_loras),
        "--max-lora-rank": lora_rank_limit(settings.max_lora_rank),
        "--max-logprobs": settings.max_logprobs,
        # Requests say all that they want; a model's own defaults would change what they mean.
        "--generation-config": "vllm",
    }
    if settings.kv_cache_bytes is not None:
        options["--kv-cache-memory-bytes"] = settings.kv_cache_bytes
    if settings.gpu_memory_utilization is not None:
        options["--gpu-memory-utilization"] = settings.gpu_memory_utilization
    if settings.devices is not None:
        options["--tensor-parallel-size"] = len(settings.devices.split(","))
    flags = ["--enable-lora", "--enable-scale-out", "--enable-prompt-tokens-details"]
    flags += ["--disable-uvicorn-access-log"]
    if settings.on_cpu:
        flags += ["--enforce-eager"]
    words = [str(word) for option in options.items() for word in option]
    return [str(settings.python), "-m", "vllm.entrypoints.openai.api_server", *words, *flags]


def environment(settings: LaunchSettings, cores: Sequence[int]) -> dict[str, str]:
    """`cores` are those that the arithmetic runs on; unused on a GPU."""
    variables = {
        **os.environ,
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1",
        # Pause, resume and abort are behind this.
        "VLLM_SERVER_DEV_MODE": "1",
        "PYTHONUNBUFFERED": "1",
    }
    # Nothing of this process's own source tree: the other environment has its own packages.
    variables.pop("PYTHONPATH", None)
    if settings.devices is not None:
        variables["CUDA_VISIBLE_DEVICES"] = settings.devices
    if settings.on_cpu:
        variables["VLLM_CPU_OMP_THREADS_BIND"] = ",".join(map(str, cores))
    return variables
