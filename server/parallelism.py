"""How the ranks of a trainer divide a base model, by the settings."""

from __future__ import annotations

from server.settings import Settings


def layout(settings: Settings) -> dict[str, int | bool | str]:
    """What only a Megatron trainer is told."""
    if settings.trainer != "megatron":
        return {}
    return {
        "tensor_parallel": settings.tensor_parallel,
        "pipeline_parallel": settings.pipeline_parallel,
        "expert_parallel": settings.expert_parallel,
        "sequence_parallel": settings.sequence_parallel,
        "moe_router_dtype": settings.moe_router_dtype,
    }


def microbatches_at_once(settings: Settings) -> int:
    """How many a trainer group works on at a time: one for each rank, but for those that divide
    the layers of one among them."""
    return settings.trainer_world_size // settings.tensor_parallel


def refusal(settings: Settings) -> str | None:
    """Why no trainer can be as the settings say, or None."""
    if settings.trainer == "local":
        return _not_local(settings)
    if ":" in settings.device:
        return (
            f"device {settings.device} is one: trainer {settings.trainer} takes cpu, cuda or auto"
        )
    return _not_divided(settings) if settings.trainer == "megatron" else _not_whole(settings)


def _not_local(settings: Settings) -> str | None:
    if settings.trainer_world_size > 1:
        return (
            f"trainer_world_size is {settings.trainer_world_size}, but trainer local is one "
            "process: set trainer to fsdp or megatron"
        )
    if settings.ray is not None:
        return f"ray is {settings.ray}, but trainer local is not hosted by Ray"
    return _not_whole(settings)


def _not_whole(settings: Settings) -> str | None:
    """What only Megatron divides must not be."""
    for name in ("tensor_parallel", "pipeline_parallel", "expert_parallel"):
        if (size := getattr(settings, name)) > 1:
            return f"{name} is {size}, but trainer {settings.trainer} has none: set it to megatron"
    if settings.sequence_parallel:
        return f"trainer {settings.trainer} has no sequence_parallel: set it to megatron"
    return None


def _not_divided(settings: Settings) -> str | None:
    world, tensor = settings.trainer_world_size, settings.tensor_parallel
    pipeline, expert = settings.pipeline_parallel, settings.expert_parallel
    if world % (tensor * pipeline):
        return (
            f"tensor_parallel {tensor} times pipeline_parallel {pipeline} is {tensor * pipeline}, "
            f"which does not divide trainer_world_size {world}"
        )
    if (copies := world // (tensor * pipeline)) % expert:
        return (
            f"expert_parallel {expert} does not divide the {copies} copies of a layer "
            f"(trainer_world_size {world}, tensor_parallel {tensor}, pipeline_parallel {pipeline})"
        )
    if settings.sequence_parallel and tensor == 1:
        return "sequence_parallel divides what tensor_parallel does, and tensor_parallel is 1"
    return None
