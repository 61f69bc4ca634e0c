"""What `hearth doctor --plan` does with its options."""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from server.planning.activations import PassShape
from server.planning.engine import Serving
from server.planning.linears import GROUPS
from server.planning.memory import Workload
from server.planning.picking import Machine, Task
from server.planning.report import print_plan
from server.planning.shapes import ModelShape, PlanRefused
from server.settings import Settings

H200_GIB = 139.0
"""What a program finds on one; NVIDIA counts 141 GB."""

_DTYPE_BYTES = {"float32": 4, "bfloat16": 2}


def plan(
    settings: Settings,
    model: str,
    *,
    gpus: int | None,
    gpu_memory: float | None,
    runs: int,
    rank: int,
    train: str,
    dtype: str,
    console: Console,
) -> None:
    """Print what `model` (a name of the settings, a folder, a config.json) takes. `gpu_memory` is
    in GiB. Raises PlanRefused."""
    if dtype not in _DTYPE_BYTES:
        raise PlanRefused(f"--dtype {dtype!r} is none of {', '.join(_DTYPE_BYTES)}")
    shape = ModelShape.of(read_config(settings, model))
    made = PassShape(dtype_bytes=_DTYPE_BYTES[dtype], rank=rank, groups=_groups(train))
    context = min(settings.max_context_length or shape.max_context_length, shape.max_context_length)
    found = _found_gib() if gpus is None or gpu_memory is None else []
    task = Task(
        shape=shape,
        workload=Workload(runs=runs, made=made),
        serving=Serving(loras=settings.engine_max_loras, lora_rank=rank, context=context),
        machine=Machine(
            gpus=gpus or len(found) or 1,
            gpu_bytes=(gpu_memory or min(found, default=H200_GIB)) * 2**30,
        ),
    )
    print_plan(model, task, console)


def read_config(settings: Settings, model: str) -> Mapping[str, Any]:
    """Raises PlanRefused when there is none, or it cannot be read."""
    path = settings.models.get(model, Path(model).expanduser())
    file = path / "config.json" if path.is_dir() else path
    if not file.is_file():
        raise PlanRefused(
            f"--plan {model!r} is no base model of the settings, no folder with a config.json, "
            "and no such file"
        )
    try:
        config = json.loads(file.read_bytes())
    except (OSError, ValueError) as error:
        raise PlanRefused(f"{file} cannot be read: {error}") from error
    if not isinstance(config, dict):
        raise PlanRefused(f"{file} holds no JSON object")
    return config


def _groups(text: str) -> tuple[str, ...]:
    groups = tuple(text.split(","))
    for group in groups:
        if group not in GROUPS:
            raise PlanRefused(f"--train {text!r}: {group!r} is none of {', '.join(GROUPS)}")
    return groups


def _found_gib() -> Sequence[float]:
    """Memory of each GPU of this machine, in GiB; nothing without NVIDIA's driver."""
    if shutil.which("nvidia-smi") is None:
        return []
    question = ["nvidia-smi", "--query-gpu=memory.total", "--format=csv,noheader,nounits"]
    try:
        answer = subprocess.run(question, capture_output=True, text=True, check=True, timeout=30)
        return [float(line) / 1024 for line in answer.stdout.split()]
    except (OSError, ValueError, subprocess.SubprocessError) as error:
        raise PlanRefused(f"nvidia-smi does not tell the memory: {error}") from error
