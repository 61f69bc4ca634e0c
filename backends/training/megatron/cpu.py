"""Megatron on a CPU, for tests and small models.

Megatron names CUDA where any device would do. `install` puts the CPU in those places, one by one.
It is called before anything of Megatron is used, and only where there is no CUDA device. The
kernels themselves need nothing: Megatron's local layers are plain torch.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils import _device

_CPU = torch.device("cpu")
_FACTORIES = ("empty", "full", "ones", "tensor", "zeros")
_NO_OPS = ("empty_cache", "set_device", "synchronize")


class _Stream:
    """One queue of work, as a CPU has."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass

    def wait_stream(self, stream: _Stream) -> None:
        pass

    def record_event(self) -> _Stream:
        return self

    def synchronize(self) -> None:
        pass


@functools.cache
def install() -> None:
    """Harmless to repeat."""
    assert not torch.cuda.is_available(), "CUDA would be hidden from the whole process"
    _put_devices_on_the_cpu()
    _send_whole_rows()
    _count_in_lists()
    _let_sizes_differ()
    _keep_random_states_on_the_cpu()


def _put_devices_on_the_cpu() -> None:
    cuda: Any = torch.cuda
    cuda.current_device = lambda: _CPU
    cuda.Stream = cuda.current_stream = _Stream
    cuda.stream = nullcontext
    for name in _NO_OPS:
        setattr(cuda, name, lambda *args, **kwargs: None)
    Tensor.cuda = lambda self, *args, **kwargs: self
    # `with torch.device("meta")` knows the constructors by identity, from a table that is filled
    # on first use: it must hold those that are about to be wrapped.
    _device._device_constructors()
    for name in _FACTORIES:
        setattr(torch, name, _without_cuda(getattr(torch, name)))


def _without_cuda(factory: Callable[..., Tensor]) -> Callable[..., Tensor]:
    @functools.wraps(factory)
    def wrapped(*args: Any, **kwargs: Any) -> Tensor:
        if str(kwargs.get("device")).startswith("cuda"):
            kwargs["device"] = _CPU
        return factory(*args, **kwargs)

    return wrapped


def _send_whole_rows() -> None:
    """gloo's scatter reads memory end to end whatever the strides, so that a weight cut along its
    second dim arrives wrong, and silently."""
    scatter = dist.scatter

    def wrapped(
        tensor: Tensor, scatter_list: Sequence[Tensor] | None = None, *args: Any, **kwargs: Any
    ) -> Any:
        pieces = None if scatter_list is None else [piece.contiguous() for piece in scatter_list]
        return scatter(tensor, pieces, *args, **kwargs)

    dist.scatter = wrapped


def _count_in_lists() -> None:
    """How many rows go to whom is an array where it came from a GPU, and else a tensor."""
    torch_dist: Any = dist
    all_to_all = torch_dist.all_to_all_single

    def wrapped(
        output: Tensor,
        input: Tensor,
        output_split_sizes: Any = None,
        input_split_sizes: Any = None,
        **kwargs: Any,
    ) -> Any:
        sizes = (
            None if each is None else [int(n) for n in each]
            for each in (output_split_sizes, input_split_sizes)
        )
        return all_to_all(output, input, *sizes, **kwargs)

    torch_dist.all_to_all_single = wrapped


def _let_sizes_differ() -> None:
    """Each rank may have another number of rows for experts; gloo wants as many of all."""
    torch_dist: Any = dist
    all_gather, reduce_scatter = torch_dist.all_gather, torch_dist.reduce_scatter

    def gathered(
        tensors: Sequence[Tensor], tensor: Tensor, group: Any = None, **kwargs: Any
    ) -> Any:
        if len({each.shape for each in tensors}) == 1:
            return all_gather(list(tensors), tensor, group=group, **kwargs)
        own = dist.get_rank(group)
        for rank, each in enumerate(tensors):
            if rank == own:
                each.copy_(tensor)
            dist.broadcast(each, group=group, group_src=rank)
        return None

    def scattered(
        output: Tensor, tensors: Sequence[Tensor], group: Any = None, **kwargs: Any
    ) -> Any:
        if len({each.shape for each in tensors}) == 1:
            return reduce_scatter(output, list(tensors), group=group, **kwargs)
        own = dist.get_rank(group)
        for rank, each in enumerate(tensors):
            summand = each.clone()
            dist.reduce(summand, group=group, group_dst=rank)
            if rank == own:
                output.copy_(summand)
        return None

    torch_dist.all_gather, torch_dist.reduce_scatter = gathered, scattered


def _keep_random_states_on_the_cpu() -> None:
    """Nothing is random in a frozen model, but Megatron sets its generators up all the same."""
    from megatron.core.tensor_parallel import random

    cuda: Any = torch.cuda
    cuda.get_rng_state = lambda *args, **kwargs: torch.get_rng_state()
    cuda.manual_seed = torch.manual_seed
    random._get_cuda_rng_state = lambda *args, **kwargs: torch.get_rng_state()
    random._set_cuda_rng_state = lambda state, *args, **kwargs: torch.set_rng_state(state)
