"""Megatron on a CPU, for tests and small models.

Megatron names CUDA where any device would do. `install` puts the CPU in those places, one by one,
and makes the two libraries importable without TransformerEngine. It is called before anything of
`megatron` is imported, and only where there is no CUDA device. The kernels themselves need nothing:
Megatron's local layers are plain torch.
"""

from __future__ import annotations

import builtins
import functools
import importlib
import types
import warnings
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils import _device

_CPU = torch.device("cpu")
_FACTORIES = ("empty", "full", "ones", "tensor", "zeros")
_NO_OPS = ("empty_cache", "set_device", "synchronize")
_WANTS_TE = "megatron.bridge.peft"


class _Stream:
    """One queue of work, as a CPU has."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass

    def wait_stream(self, stream: _Stream) -> None:
        pass


@functools.cache
def install() -> None:
    """Harmless to repeat."""
    assert not torch.cuda.is_available(), "CUDA would be hidden from the whole process"
    _put_devices_on_the_cpu()
    _send_whole_rows()
    _import_without_transformer_engine()
    _keep_random_states_on_the_cpu()


def _put_devices_on_the_cpu() -> None:
    torch.cuda.current_device = lambda: _CPU  # pyrefly: ignore[bad-assignment]
    torch.cuda.Stream = _Stream  # pyrefly: ignore[bad-assignment]
    torch.cuda.current_stream = _Stream
    torch.cuda.stream = _on_stream
    Tensor.cuda = lambda self, *args, **kwargs: self
    for name in _NO_OPS:
        setattr(torch.cuda, name, lambda *args, **kwargs: None)
    # `with torch.device("meta")` knows the constructors by identity, from a table that is filled
    # on first use: it must hold those that are about to be wrapped.
    _device._device_constructors()
    for name in _FACTORIES:
        setattr(torch, name, _without_cuda(getattr(torch, name)))


def _on_stream(stream: _Stream) -> AbstractContextManager[None]:
    return nullcontext()


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


def _import_without_transformer_engine() -> None:
    """The bridge's own LoRA layers, which we do not use, derive from TransformerEngine's and are
    imported with everything else of it. Only they are given something to derive from: whoever
    asks whether TransformerEngine is there must hear that it is not."""
    layers = types.ModuleType("transformer_engine.pytorch")
    layers.__getattr__ = lambda name: type(name, (torch.nn.Module,), {})
    root = types.ModuleType("transformer_engine")
    root.pytorch, layers.ops = layers, layers
    real = builtins.__import__

    def wrapped(
        name: str, globals: Any = None, locals: Any = None, fromlist: Any = (), level: int = 0
    ) -> Any:
        importer = str((globals or {}).get("__name__", ""))
        if name.split(".")[0] == "transformer_engine" and importer.startswith(_WANTS_TE):
            return layers if fromlist else root
        return real(name, globals, locals, fromlist, level)

    builtins.__import__ = wrapped
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # a dozen, all of what is not installed
            importlib.import_module("megatron.bridge")
    finally:
        builtins.__import__ = real


def _keep_random_states_on_the_cpu() -> None:
    """Nothing is random in a frozen model, but Megatron sets its generators up all the same."""
    from megatron.core.tensor_parallel import random

    torch.cuda.get_rng_state = lambda *args, **kwargs: torch.get_rng_state()
    torch.cuda.manual_seed = torch.manual_seed
    random._get_cuda_rng_state = lambda *args, **kwargs: torch.get_rng_state()
    random._set_cuda_rng_state = lambda state, *args, **kwargs: torch.set_rng_state(state)
