"""The trainer of several processes that share one frozen base model (FSDP2's `fully_shard`).

Each rank has a part of every base weight, and gathers a layer's when it comes to it. Adapters,
gradients and moments are whole on every rank and no concern of FSDP's. The datums of a pass are
spread over the ranks; what each finds of a gradient is summed once, when the request is complete.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor

from backends.batching.attention import packed_attention
from backends.batching.packing import SHARED_FORWARD_TOKENS
from backends.batching.spreading import Round, spread
from backends.lora.adapter import UNEMBED
from backends.model import FrozenModel
from backends.training.activations import Activations, Checkpointing
from backends.training.divided import DividedRanks
from backends.training.lane import Lane
from backends.training.packed_pass import PackedPass
from backends.training.shares import Share
from backends.training.trainer import Trainer


def load(
    path: str | Path,
    *,
    dtype: torch.dtype,
    device: torch.device,
    max_tokens_per_microbatch: int,
    activation_checkpointing: Checkpointing,
    device_run_bytes: int | None = None,
) -> Trainer:
    """In every process of the default group, whose backend is for `device`. Raises like
    `FrozenModel.load`."""
    model = ShardedModel.load(path, dtype, torch.device("cpu"))
    model.shard(init_device_mesh(device.type, (dist.get_world_size(),)))
    activations = Activations(model, activation_checkpointing)
    passes = _ShardedPasses(model, activations, max_tokens_per_microbatch)
    whole = {t.name: Share((0, t.in_features), (0, t.out_features)) for t in model.targets}
    return Trainer(model, passes, DividedRanks(whole), device_run_bytes)


class _Trunk(nn.Module):
    """All that is used from the first layer to the loss, so that FSDP gathers what belongs to no
    layer (embedding, norm and head) before the first, and keeps it until the backward is over."""

    def __init__(self, layers: nn.Module, head: nn.Module) -> None:
        super().__init__()
        self.layers = layers
        self.head = head

    def forward(self, **inputs: Any) -> Any:
        return self.layers(**inputs)


class ShardedModel(FrozenModel):
    """A frozen model of which every rank has a part. Whatever is computed with it is computed by
    all ranks at the same time, so that the gathering of weights goes in step."""

    def shard(self, mesh: DeviceMesh) -> None:
        """Leave this rank its part, on the device of the mesh."""
        trunk = _Trunk(self._layers, self._model.get_submodule(UNEMBED))
        for layer in self._layers.get_submodule("layers").children():
            fully_shard(layer, mesh=mesh)
        self._root: FSDPModule = fully_shard(trunk, mesh=mesh)
        self._layers.get_submodule("embed_tokens").register_forward_hook(_want_gradient)
        self._layers = trunk

    def free(self) -> None:
        """Give up what was gathered and belongs to no layer."""
        self._root.reshard()

    @property
    def num_bytes(self) -> int:
        return sum(_local(p).nbytes for p in self._model.parameters())


def _want_gradient(module: nn.Module, inputs: object, output: Tensor) -> None:
    """The backward goes through all layers whichever of them have adapters: it gathers weights,
    and every rank must take part in that."""
    if torch.is_grad_enabled():
        output.requires_grad_()


def _local(parameter: Tensor) -> Tensor:
    return parameter.to_local() if isinstance(parameter, DTensor) else parameter


class _ShardedPasses:
    def __init__(self, model: ShardedModel, activations: Activations, max_tokens: int) -> None:
        self._model = model
        self._activations = activations
        self._max_tokens = max_tokens
        self._rank, self._num_ranks = dist.get_rank(), dist.get_world_size()

    def __call__(
        self, lanes: Sequence[Lane], make_room: Callable[[], bool]
    ) -> Generator[None, None, None]:
        """Memory that runs out on one rank is not made up for: the others are in the middle of
        a round with it."""
        packed = _ShardedPass(self._model, lanes, self._activations, make_room)
        packed.measure()
        shared = SHARED_FORWARD_TOKENS[self._model.device.type]
        rounds = spread(*packed.shape(), self._max_tokens, shared, self._num_ranks)
        for number, one in enumerate(rounds):
            if number:
                yield
            packed.take_part(one, self._rank)


class _ShardedPass(PackedPass):
    """What one rank does of a pass."""

    def __init__(
        self,
        model: ShardedModel,
        lanes: Sequence[Lane],
        activations: Activations,
        make_room: Callable[[], bool],
    ) -> None:
        super().__init__(model, lanes, activations, make_room)
        self._sharded = model

    def take_part(self, one: Round, rank: int) -> None:
        """Run this rank's microbatch of a round, or what keeps it in step with the others."""
        microbatch = self.wanted(one.microbatches[rank])
        if microbatch.pieces:
            recompute = self._activations.tries(microbatch)[0]
            self.compute(microbatch, recompute, one.backward)
        else:
            self._idle(one.backward)
        self._sharded.free()

    def backward(self, hidden: Tensor, loss: Tensor | None) -> None:
        if hidden.requires_grad:
            super().backward(hidden, (0 * hidden).sum() if loss is None else loss)

    def _idle(self, backward: bool) -> None:
        model, zero = self._model, torch.zeros(1, dtype=torch.long, device=self._model.device)
        plan = packed_attention([1], model.device, model.dtype)
        with torch.set_grad_enabled(backward):
            hidden = model.hidden(zero, zero, [], plan)
        self.backward(hidden, None)
