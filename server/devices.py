"""Which GPUs the trainers and the vLLM servers run on, by the settings."""

from __future__ import annotations

import re
from collections.abc import Sequence

from server.settings import Settings

_GPUS = re.compile(r"[^\s,]+(,[^\s,]+)*")


def refusal(settings: Settings) -> str | None:
    """Why the devices that are named cannot be those of what is started, or None."""
    models = len(settings.models)
    wanted = {
        "trainer_devices": models * settings.trainer_groups,
        "engine_devices": models * settings.engine_replicas,
    }
    for name, count in wanted.items():
        devices: Sequence[str] = getattr(settings, name)
        if devices and len(devices) != count:
            what = "trainer" if name == "trainer_devices" else "vLLM server"
            return f"{name} names GPUs for {len(devices)}, but {count} {what}s are started"
        for entry in devices:
            if not _GPUS.fullmatch(entry):
                return f"{name}: {entry!r} is no list of GPUs such as 0 or 0,1"
    if settings.engine_devices and (settings.engine != "vllm" or settings.engine_urls):
        return "engine_devices are those of vLLM servers that Hearth starts, and it starts none"
    return None


def of_trainer(settings: Settings, model: str, number: int) -> str | None:
    """CUDA_VISIBLE_DEVICES of the base model's trainer group with this number; None is what this
    process sees."""
    if not settings.trainer_devices:
        return None
    index = list(settings.models).index(model) * settings.trainer_groups + number
    return settings.trainer_devices[index]


def of_replicas(settings: Settings, model: int) -> Sequence[str]:
    """Of the base model with this number, one each; nothing where none are named."""
    count = settings.engine_replicas
    return settings.engine_devices[model * count : (model + 1) * count]
