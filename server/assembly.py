"""Makes what computes, as the settings say: trainer groups, the workers that sample beside them,
vLLM fleets. The only place in the server that names a concrete backend."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial

from backends.contract import ModelInfo, SamplingFleet
from backends.sampling.vllm.assemble import assemble
from backends.sampling.vllm.launch import LaunchSettings
from backends.workers.commands import SAMPLES_AT_ONCE, Command, local_worker, trainer_group
from backends.workers.subprocess import SubprocessBackend
from backends.workers.supervised import SupervisedBackend
from server import devices, engine_urls, parallelism
from server.core.ids import TenantId
from server.samplers.gate import Gate
from server.settings import Settings, has_gpu

_GROUP_TRAINERS = {
    "fsdp": "backends.training.fsdp",
    "megatron": "backends.training.megatron.trainer",
}
"""Modules that make the trainer of a rank; named, since only the ranks can import them."""


def refusal(settings: Settings) -> str | None:
    """Why what the settings say cannot be made, or None."""
    return (
        parallelism.refusal(settings)
        or devices.refusal(settings)
        or engine_urls.refusal(settings)
        or _unsampled(settings)
    )


def _unsampled(settings: Settings) -> str | None:
    """Which model could be trained, but not sampled from."""
    if (settings.trainer, settings.engine) != ("megatron", "embedded"):
        return None
    for name, path in settings.models.items():
        file = path / "config.json"
        config = json.loads(file.read_bytes()) if file.is_file() else {}
        if config.get("num_experts") or config.get("num_local_experts"):
            return (
                f"{name} is a mixture of experts, which the embedded engine cannot sample from: "
                "choose --engine vllm"
            )
    return None


def trainer_groups(settings: Settings, model: str) -> Sequence[SupervisedBackend]:
    """Of one base model. Local ones sample too."""
    return [
        _supervised(settings, _trainer(settings, model, number), f"worker-{_file(model, number)}")
        for number in range(settings.trainer_groups)
    ]


def sampling_worker(settings: Settings, model: str) -> SupervisedBackend | None:
    """A worker that is never asked to train, where neither the trainer samples nor vLLM."""
    if settings.trainer == "local" or settings.engine != "embedded":
        return None
    return _supervised(settings, _local(settings, model, 0), f"sampler-{_file(model, 0)}")


def vllm_fleet(settings: Settings, model: str, info: ModelInfo) -> SamplingFleet:
    number = list(settings.models).index(model)
    launch = LaunchSettings(
        model=settings.models[model],
        python=settings.engine_python,
        max_model_len=info.max_context_length,
        dtype=settings.dtype,
        max_num_seqs=settings.engine_max_num_seqs,
        max_loras=settings.engine_max_loras,
        max_cpu_loras=max(settings.engine_max_cpu_loras, settings.engine_max_loras),
        max_lora_rank=settings.engine_max_lora_rank,
        kv_cache_bytes=settings.engine_kv_cache_bytes,
        gpu_memory_utilization=settings.engine_gpu_memory_utilization,
        on_cpu=not has_gpu(),
    )
    return assemble(
        launch,
        names=_replica_names(settings, number),
        urls=settings.engine_urls,
        folder=settings.data / "logs",
        devices=devices.of_replicas(settings, number),
    )


def gates(
    settings: Settings, models: Iterable[str], stuck: Callable[[str], int]
) -> Mapping[str, Gate]:
    """Before the engine of each base model, of whose samples so many are `stuck`."""
    at_once = SAMPLES_AT_ONCE
    if settings.engine == "vllm":
        at_once = settings.engine_max_num_seqs * _num_replicas(settings)
    room = settings.max_running_samples or 2 * at_once
    weights = tenant_weights(settings)
    return {name: Gate(room, weights, partial(stuck, name)) for name in models}


def limited(info: ModelInfo, settings: Settings) -> ModelInfo:
    """What of a base model's abilities the settings leave."""
    longest = min(settings.max_context_length or info.max_context_length, info.max_context_length)
    rank = settings.engine_max_lora_rank if settings.engine == "vllm" else None
    return replace(info, max_context_length=longest, max_lora_rank=rank)


def tenant_weights(settings: Settings) -> Mapping[TenantId, float]:
    return {TenantId(name): weight for name, weight in settings.tenant_weights.items()}


def _num_replicas(settings: Settings) -> int:
    return len(settings.engine_urls) or settings.engine_replicas


def _replica_names(settings: Settings, model: int) -> list[str]:
    """Of the base model with this number; no other has any of them."""
    count = _num_replicas(settings)
    return [f"replica-{model * count + i}" for i in range(count)]


def _supervised(settings: Settings, command: Command, log_name: str) -> SupervisedBackend:
    logs = settings.data / "logs"

    async def start() -> SubprocessBackend:
        logs.mkdir(parents=True, exist_ok=True)
        return await SubprocessBackend.start(command, logs / log_name)

    return SupervisedBackend(start)


def _file(model: str, number: int) -> str:
    name = model.replace("/", "--")
    return f"{name}-{number}.log" if number else f"{name}.log"


def _trainer(settings: Settings, model: str, number: int) -> Command:
    """Of the base model's trainer group with this number."""
    return (_local if settings.trainer == "local" else _ranks)(settings, model, number)


def _threads(settings: Settings) -> int:
    return settings.threads or max(1, (os.cpu_count() or 1) // settings.trainer_groups)


def _local(settings: Settings, model: str, number: int) -> Command:
    return local_worker(
        settings.models[model],
        dtype=settings.dtype,
        device=settings.device,
        device_run_bytes=settings.device_run_bytes,
        visible_devices=devices.of_trainer(settings, model, number),
        threads=_threads(settings),
        max_tokens_per_microbatch=settings.max_tokens_per_microbatch,
        activation_checkpointing=settings.activation_checkpointing,
    )


def _ranks(settings: Settings, model: str, number: int) -> Command:
    own = {"python": settings.trainer_python} if settings.trainer == "megatron" else {}
    return trainer_group(
        settings.models[model],
        trainer=_GROUP_TRAINERS[settings.trainer],
        world_size=settings.trainer_world_size,
        layout=parallelism.layout(settings),
        ray=settings.ray,
        dtype=settings.dtype,
        device=settings.device,
        device_run_bytes=settings.device_run_bytes,
        visible_devices=devices.of_trainer(settings, model, number),
        threads=_threads(settings),
        max_tokens_per_microbatch=settings.max_tokens_per_microbatch,
        activation_checkpointing=settings.activation_checkpointing,
        **own,
    )
