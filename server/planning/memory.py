"""What each GPU of a trainer holds, for each backend."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from server.planning import activations, layouts
from server.planning.activations import PassShape
from server.planning.layouts import Sizes, Stage
from server.planning.shapes import ModelShape

Backend = Literal["local", "fsdp", "megatron"]

_FLOAT = 4
CONTEXT_BYTES = 2 << 30
"""For the CUDA context, the workspaces of libraries and the buffers of NCCL: an assumption."""

GATHERED_LAYERS = 2
"""FSDP gathers the next layer while one computes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """What is to be trained: `runs` adapters, all of them in one pass at times."""

    runs: int
    made: PassShape


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainerMemory:
    """Bytes on the fullest GPU of one trainer, while all runs are in one pass."""

    backend: Backend
    sizes: Sizes
    base: int
    """Frozen weights that stay."""
    gathered: int
    """Frozen weights of others that FSDP brings while they are needed."""
    adapters: int
    optimizer: int
    """Two moments and the gradient that waits for a step."""
    in_pass: int
    """Of each run: its gradient in this pass and in this microbatch, and a copy of the adapter in
    the model's dtype if that is another."""
    logits: int
    kept_token: float
    """Activations of a token, kept for backward."""
    input_token: float
    """Activations of a token when layers are computed again."""
    working_token: tuple[float, float]
    """What backward makes on its way, of a token: kept, computed again."""

    @property
    def held(self) -> int:
        """Whatever the microbatch."""
        states = self.adapters + self.optimizer + self.in_pass
        return self.base + self.gathered + states + self.logits + CONTEXT_BYTES

    def activations(self, tokens: int, *, recompute: bool) -> int:
        kept = self.input_token if recompute else self.kept_token
        return round(tokens * (kept + self.working_token[recompute]))

    def total(self, tokens: int, *, recompute: bool) -> int:
        return self.held + self.activations(tokens, recompute=recompute)

    def longest(self, available: float) -> int:
        """Tokens of the longest sequence that fits, computed again."""
        room = available - self.held
        return max(0, int(room / (self.input_token + self.working_token[True])))


def local(shape: ModelShape, workload: Workload) -> TrainerMemory:
    """Everything on one device."""
    whole = layouts.stages(shape, Sizes())[0]
    return _of_stage(shape, workload, "local", whole)


def fsdp(shape: ModelShape, workload: Workload, world: int) -> TrainerMemory:
    """The base is cut into `world` parts, adapters are whole on every rank. Embedding, head and
    last norm stay gathered through a pass, layers come and go."""
    parameters = layouts.base_parameters(shape)
    per_layer = [layouts.layer_parameters(shape, i) for i in range(shape.num_layers)]
    outside = parameters - sum(per_layer)
    gathered = outside + GATHERED_LAYERS * layouts.largest_layer(shape) if world > 1 else 0
    whole = layouts.stages(shape, Sizes())[0]
    return _of_stage(
        shape,
        workload,
        "fsdp",
        whole,
        base=-(-parameters // world),
        gathered=gathered,
        sizes=Sizes(data=world),
    )


def megatron(shape: ModelShape, workload: Workload, sizes: Sizes) -> TrainerMemory:
    """Base and adapters are cut alike; the fullest stage counts, with as many microbatches in
    flight as there are stages behind it."""
    each = [_of_stage(shape, workload, "megatron", s) for s in layouts.stages(shape, sizes)]
    return max(each, key=lambda memory: memory.total(4096, recompute=True))


def _of_stage(
    shape: ModelShape,
    workload: Workload,
    backend: Backend,
    stage: Stage,
    *,
    base: int | None = None,
    gathered: int = 0,
    sizes: Sizes | None = None,
) -> TrainerMemory:
    made = workload.made
    numbers = workload.runs * layouts.adapter_numbers(shape, made.rank, made.groups, stage)
    in_flight = stage.sizes.pipeline - stage.number
    kept, inputs = (
        in_flight * activations.per_token(shape, made, recompute=recompute, stage=stage)
        for recompute in (False, True)
    )
    working = tuple(
        activations.working(shape, made, recompute=recompute, sizes=stage.sizes)
        for recompute in (False, True)
    )
    copy_bytes = made.dtype_bytes if made.dtype_bytes != _FLOAT else 0
    parameters = layouts.base_parameters(shape, stage) if base is None else base
    return TrainerMemory(
        backend=backend,
        sizes=sizes or stage.sizes,
        base=parameters * made.dtype_bytes,
        gathered=gathered * made.dtype_bytes,
        adapters=_FLOAT * numbers,
        optimizer=3 * _FLOAT * numbers,
        in_pass=(2 * _FLOAT + copy_bytes) * numbers,
        logits=activations.logits_bytes(shape, made) if stage.last else 0,
        kept_token=kept,
        input_token=inputs,
        working_token=(working[0], working[1]),
    )
