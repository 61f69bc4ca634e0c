"""What `hearth doctor --plan` prints: a table for each backend, and with what to start."""

from __future__ import annotations

from collections.abc import Iterator

from rich.console import Console
from rich.table import Column, Table

from server.planning import engine
from server.planning.memory import CONTEXT_BYTES, Backend
from server.planning.picking import Placement, Task, choose
from server.planning.shapes import PlanRefused
from server.planning.words import counted, gib

_FOUND = (
    "Base, adapters and optimizer are exact. Activations were within 20 % of what the local "
    "backend's passes took on a CPU; of experts, pipelines and GPUs they are reckoned, not "
    "measured. The context and vLLM's workspace are assumptions."
)


def print_plan(name: str, task: Task, console: Console) -> None:
    """Raises PlanRefused, after what there is to show, when no backend fits."""
    outcomes, best = choose(task)
    for backend, outcome in outcomes.items():
        if isinstance(outcome, PlanRefused):
            console.print(f"{outcome}.", soft_wrap=True)
        else:
            console.print(_table(task, backend, outcome))
    if best is None:
        raise PlanRefused(
            f"{name} does not fit on {_machine(task)} with {counted(task.workload.runs, 'run')} of "
            f"rank {task.workload.made.rank}; fewer runs, a smaller rank and --train attn take less"
        )
    chosen = outcomes[best]
    assert isinstance(chosen, Placement)
    console.print(_FOUND)
    console.print(recommendation(name, task, chosen), soft_wrap=True)


def recommendation(name: str, task: Task, placement: Placement) -> str:
    """One sentence."""
    lines = ", ".join(f"{key} = {value}" for key, value in _settings(task, placement).items())
    command = " ".join(["hearth serve", *_flags(task, placement)])
    return f"For {name} on {_machine(task)}, start with `{command}` and, in hearth.toml, {lines}."


def _flags(task: Task, placement: Placement) -> Iterator[str]:
    trainer, sizes = placement.trainer, placement.trainer.sizes
    yield "--model NAME=PATH"
    yield f"--dtype {'float32' if task.dtype_bytes == 4 else 'bfloat16'}"
    yield f"--trainer {trainer.backend}"
    if trainer.backend != "local":
        yield f"--world-size {sizes.world}"
    for axis in ("tensor", "pipeline", "expert"):
        if (size := getattr(sizes, axis)) > 1:
            yield f"--{axis}-parallel {size}"
    if placement.replica is not None:
        yield f"--engine vllm --replicas {placement.replicas}"


def _settings(task: Task, placement: Placement) -> dict[str, object]:
    world, replica = placement.trainer.sizes.world, placement.replica
    settings: dict[str, object] = {
        "max_tokens_per_microbatch": placement.tokens,
        # So that a pass fills its microbatches.
        "tick_token_budget": placement.tokens,
    }
    if replica is None:
        return settings
    settings["engine_max_lora_rank"] = task.serving.lora_rank
    if placement.shared:
        return settings | {"engine_gpu_memory_utilization": placement.share}
    starts = [world + i * replica.gpus for i in range(placement.replicas)]
    return settings | {
        "trainer_devices": _toml([_devices(0, world)]),
        "engine_devices": _toml([_devices(start, replica.gpus) for start in starts]),
    }


def _devices(first: int, count: int) -> str:
    return ",".join(str(first + i) for i in range(count))


def _toml(texts: list[str]) -> str:
    return "[" + ", ".join(f'"{text}"' for text in texts) + "]"


def _machine(task: Task) -> str:
    machine = task.machine
    return f"{counted(machine.gpus, 'GPU')} of {gib(machine.gpu_bytes)}"


def _table(task: Task, backend: Backend, placement: Placement) -> Table:
    numbers = Column("GiB a GPU", justify="right")
    table = Table("", numbers, "what", title=f"{backend}: {_layout(placement)}")
    for row in _trainer_rows(task, placement):
        table.add_row(*row)
    table.add_section()
    for row in _engine_rows(task, placement):
        table.add_row(*row)
    longest = placement.trainer.longest(placement.available)
    table.caption = f"the longest sequence that fits has {longest:,} tokens"
    return table


def _layout(placement: Placement) -> str:
    sizes = placement.trainer.sizes
    axes = [
        f"{axis} {size}"
        for axis in ("tensor", "pipeline", "data", "expert")
        if (size := getattr(sizes, axis)) > 1
    ]
    trains = f"{counted(sizes.world, 'GPU')} for the trainer"
    layout = f"{trains} ({', '.join(axes)})" if axes else trains
    if placement.replica is None:
        return f"{layout}, which also samples"
    if placement.shared:
        return f"{layout} and vLLM together"
    each = counted(placement.replica.gpus, "GPU")
    return f"{layout}, {counted(placement.replicas, 'replica')} of vLLM with {each} each"


def _trainer_rows(task: Task, placement: Placement) -> Iterator[tuple[str, str, str]]:
    trainer, runs = placement.trainer, counted(task.workload.runs, "run")
    activations = trainer.activations(placement.tokens, recompute=placement.recompute)
    how = "computed again in backward" if placement.recompute else "kept"
    rank = task.workload.made.rank
    yield "base", _number(trainer.base), "frozen weights"
    if trainer.gathered:
        yield "gathered", _number(trainer.gathered), "embedding, head and layers in use"
    yield "adapters", _number(trainer.adapters), f"{runs} of rank {rank}, in float32"
    yield "optimizer", _number(trainer.optimizer), "two moments and the gradient of each"
    yield "pass", _number(trainer.in_pass), "gradients on their way, and copies"
    yield "activations", _number(activations), f"{placement.tokens:,} tokens, {how}"
    yield "other", _number(trainer.logits + CONTEXT_BYTES), "a chunk of logits, the context"
    total = trainer.total(placement.tokens, recompute=placement.recompute)
    yield "together", _number(total), f"of {gib(placement.available)}"


def _engine_rows(task: Task, placement: Placement) -> Iterator[tuple[str, str, str]]:
    replica = placement.replica
    if replica is None:
        cache = engine.EMBEDDED_TOKENS * engine.kv_bytes(task.shape, task.dtype_bytes)
        yield "sampling", _number(cache), f"keys and values of {engine.EMBEDDED_TOKENS:,} tokens"
        return
    share = placement.share * task.machine.gpu_bytes
    serving, room = task.serving, replica.kv_tokens(share)
    yield "vLLM: base", _number(replica.base), "frozen weights"
    slots = f"{serving.loras} at once up to rank {serving.lora_rank}, on every layer"
    yield "vLLM: adapters", _number(replica.lora_slots), slots
    yield "vLLM: other", _number(engine.WORKSPACE_BYTES), "workspace, CUDA graphs, the context"
    yield "vLLM: cache", _number(room * replica.kv_token), f"keys and values of {room:,} tokens"
    yield "together", _number(share), f"{placement.share:.0%} of {gib(task.machine.gpu_bytes)}"


def _number(num_bytes: float) -> str:
    return f"{num_bytes / 2**30:,.2f}"
