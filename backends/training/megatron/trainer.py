"""The trainer of several processes that share one base model by Megatron's ways of dividing it."""

from __future__ import annotations

from pathlib import Path

import torch

from backends.training.activations import Checkpointing
from backends.training.divided import DividedRanks
from backends.training.megatron.model import MegatronModel, RouterDtype
from backends.training.megatron.parallel import Parallel
from backends.training.megatron.passes import MegatronPasses
from backends.training.trainer import Trainer


def load(
    path: str | Path,
    *,
    dtype: torch.dtype,
    device: torch.device,
    max_tokens_per_microbatch: int,
    activation_checkpointing: Checkpointing,
    device_run_bytes: int | None = None,
    tensor_parallel: int = 1,
    pipeline_parallel: int = 1,
    expert_parallel: int = 1,
    sequence_parallel: bool = False,
    moe_router_dtype: RouterDtype = "float32",
) -> Trainer:
    """In every process of the default group, whose backend is for `device`. Raises like
    `MegatronModel.load`, for whose experts `moe_router_dtype` is."""
    parallel = Parallel(tensor_parallel, pipeline_parallel, expert_parallel, sequence_parallel)
    model = MegatronModel.load(path, dtype, device, parallel, moe_router_dtype)
    ranks = DividedRanks(model.shares)
    passes = MegatronPasses(model, ranks, max_tokens_per_microbatch, activation_checkpointing)
    return Trainer(model, passes, ranks, device_run_bytes)
