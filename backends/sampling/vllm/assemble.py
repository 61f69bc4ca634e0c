"""From settings to an engine: its replicas, started here or found where they run."""

from __future__ import annotations

import os
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from pathlib import Path

from backends.sampling.vllm.engine import VllmEngine
from backends.sampling.vllm.fleet import Fleet
from backends.sampling.vllm.launch import LaunchSettings, core_sets
from backends.sampling.vllm.model_facts import ModelFacts
from backends.sampling.vllm.process import LocalServer
from backends.sampling.vllm.remote import RemoteServer
from backends.sampling.vllm.replica import Host, Replica
from backends.sampling.vllm.routing import choose
from backends.sampling.vllm.translate import Limits
from backends.sampling.vllm.warmup import write_idle_adapter

_Start = Callable[[], Awaitable[Host]]


def assemble(
    launch: LaunchSettings,
    *,
    names: Sequence[str],
    urls: Sequence[str],
    folder: Path,
    devices: Sequence[str] = (),
) -> VllmEngine:
    """One replica for each of `names`, on the servers at `urls` if there are any, or each on its
    `devices`. `folder` is for logs. Raises BackendError when the model's folder holds none."""
    facts = replace(ModelFacts.read(launch.model), max_context_length=launch.max_model_len)
    if urls:
        starts = [_remote(url, facts) for url in urls]
    else:
        cores = core_sets(sorted(os.sched_getaffinity(0)), len(names))
        logs = [folder / f"vllm-{name}.log" for name in names]
        launches = [replace(launch, devices=own) for own in devices or [None] * len(names)]
        starts = [_local(*each) for each in zip(launches, cores, logs, strict=True)]
    idle = write_idle_adapter(launch.model, folder / f"idle-{names[0]}")
    replicas = [
        Replica(name, start, adapter_capacity=launch.max_cpu_loras, warmup_adapter=idle)
        for name, start in zip(names, starts, strict=True)
    ]
    limits = Limits(max_num_seqs=launch.max_num_seqs, max_logprobs=launch.max_logprobs)
    return VllmEngine(Fleet(replicas, choose), facts, limits)


def _local(launch: LaunchSettings, cores: Sequence[int], log_file: Path) -> _Start:
    return lambda: LocalServer.start(launch, cores, log_file)


def _remote(url: str, facts: ModelFacts) -> _Start:
    return lambda: RemoteServer.find(url, facts)
