"""The processes that speak to the service as a worker does, and what they are started with.
Imports no torch."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

SAMPLES_AT_ONCE = 32
"""How many samples a worker generates at once, unless it is told otherwise."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Command:
    module: str
    options: Mapping[str, object]
    """True is a flag without a value; what is None or False is left out."""
    python: str | Path = sys.executable
    """Of the environment that has what the module needs."""
    visible_devices: str | None = None
    """Its CUDA_VISIBLE_DEVICES, if not ours."""

    @property
    def environment(self) -> dict[str, str]:
        """Variables that it has beside ours."""
        devices = self.visible_devices
        return {} if devices is None else {"CUDA_VISIBLE_DEVICES": devices}

    @property
    def words(self) -> list[str]:
        """The options on the command line."""
        return [str(word) for option in self.options.items() for word in _words(*option)]


def local_worker(
    model_path: str | Path,
    *,
    dtype: str,
    threads: int,
    max_tokens_per_microbatch: int,
    activation_checkpointing: str = "auto",
    device: str = "auto",
    device_run_bytes: int | None = None,
    visible_devices: str | None = None,
    max_batch_size: int = SAMPLES_AT_ONCE,
    kv_token_budget: int = 65_536,
) -> Command:
    """One process that trains and samples. `kv_token_budget` is in tokens."""
    return Command(
        module="backends.workers.main",
        visible_devices=visible_devices,
        options={
            "--model": model_path,
            "--dtype": dtype,
            "--device": device,
            "--device-run-bytes": device_run_bytes,
            "--threads": threads,
            "--max-tokens-per-microbatch": max_tokens_per_microbatch,
            "--activation-checkpointing": activation_checkpointing,
            "--max-batch-size": max_batch_size,
            "--kv-token-budget": kv_token_budget,
        },
    )


def trainer_group(
    model_path: str | Path,
    *,
    trainer: str,
    world_size: int,
    dtype: str,
    threads: int,
    max_tokens_per_microbatch: int,
    activation_checkpointing: str = "auto",
    device: str = "auto",
    device_run_bytes: int | None = None,
    visible_devices: str | None = None,
    ray: str | None = None,
    layout: Mapping[str, int | bool | str] | None = None,
    python: str | Path = sys.executable,
) -> Command:
    """A coordinator and `world_size` ranks, which only train. `trainer` is the module that makes
    that of a rank (`rank.TrainerSpec`), and `layout` what it alone is told; `threads` are of all
    ranks together; `ray` is where Ray hosts them, which are processes beside it otherwise."""
    own = {f"--{name.replace('_', '-')}": value for name, value in (layout or {}).items()}
    return Command(
        module="backends.workers.group",
        python=python,
        visible_devices=visible_devices,
        options={
            "--trainer": trainer,
            "--world-size": world_size,
            "--ray": ray,
            "--model": model_path,
            "--dtype": dtype,
            "--device": device,
            "--device-run-bytes": device_run_bytes,
            "--threads": threads,
            "--max-tokens-per-microbatch": max_tokens_per_microbatch,
            "--activation-checkpointing": activation_checkpointing,
            **own,
        },
    )


def _words(name: str, value: object) -> tuple[object, ...]:
    if value is None or value is False:
        return ()
    return (name,) if value is True else (name, value)
