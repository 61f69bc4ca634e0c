"""Whether a microbatch keeps its activations for backward, or only the inputs of the layers.

Keeping them is faster, so they are kept for as long as they fit: `auto` measures what a token
takes, and compares with the memory that is free before each microbatch.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from typing import Literal, Protocol

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from backends.batching.attention import AttentionPlan, packed_attention
from backends.batching.packing import Microbatch
from backends.lora.adapter import Adapter
from backends.lora.grouping import arranged
from backends.lora.parts import Owner, Part
from backends.memory import free_bytes

Checkpointing = Literal["auto", "on", "off"]

_PROBE_TOKENS = 16

_log = logging.getLogger(__name__)


class Layers(Protocol):
    """What is measured: a model, or a stage of one."""

    @property
    def device(self) -> torch.device: ...

    @property
    def dtype(self) -> torch.dtype: ...

    def hidden(
        self,
        tokens: Tensor,
        positions: Tensor,
        segments: Sequence[Part],
        plan: AttentionPlan,
        *,
        recompute: bool = False,
    ) -> Tensor:
        """As `FrozenModel.hidden`."""
        ...


class Activations:
    """The choice for one model."""

    def __init__(self, model: Layers, checkpointing: Checkpointing) -> None:
        self._model = model
        self._checkpointing = checkpointing
        self._bytes_per_token: dict[frozenset[str], float] = {}
        """By the modules that are trained: what comes before the first of them keeps nothing."""

    def measure(self, adapters: Iterable[Adapter]) -> None:
        """Find out what a token takes, once for each choice of layers that is trained. Ranks that
        compute together must all be told of the same."""
        if self._checkpointing != "auto":
            return
        for adapter in adapters:
            modules = frozenset(adapter.layout.names)
            if modules not in self._bytes_per_token:
                found = bytes_per_token(self._model, adapter)
                self._bytes_per_token[modules] = found
                _log.info("activations take %.0f kB a token", found / 1000)

    def tries(self, microbatch: Microbatch) -> tuple[bool, ...]:
        """Whether to recompute layers: first, and then whenever memory ran out before. For `auto`
        there must have been a `measure`."""
        if not microbatch.backward or self._checkpointing == "off":
            return (False,)
        return (False, True) if self.fit(microbatch.num_tokens) else (True,)

    def fit(self, num_tokens: int) -> bool:
        """Whether those of so many tokens may be kept. As for `tries`."""
        if self._checkpointing != "auto":
            return self._checkpointing == "off"
        needed = num_tokens * max(self._bytes_per_token.values())
        return not too_large(needed, free_bytes(self._model.device))


def too_large(needed: float, free: float) -> bool:
    """Whether activations of `needed` bytes take more than half of what is free. The other half
    is for what backward makes on its way, for sampling, and for the error of the estimate."""
    return needed > free / 2


def bytes_per_token(model: Layers, adapter: Adapter, recompute: bool = False) -> float:
    """What a pass keeps of each token for its backward, by two forwards of the model itself: what
    they keep whatever their length, its weights above all, drops out of the difference."""
    short, long = (
        saved_bytes(lambda n=n: _forward(model, adapter, n, recompute))
        for n in (_PROBE_TOKENS, 2 * _PROBE_TOKENS)
    )
    return (long - short) / _PROBE_TOKENS


def saved_bytes(forward: Callable[[], Tensor]) -> int:
    """Bytes of all memory that the graph of `forward` keeps for a backward."""
    saved: list[Tensor] = []
    with torch.enable_grad(), saved_tensors_hooks(saved.append, _never_unpacked):
        # Held until all is counted: memory that is free again could be saved, and counted, twice.
        result = forward()
    storages = {s.data_ptr(): s.nbytes() for s in (tensor.untyped_storage() for tensor in saved)}
    del result
    return sum(storages.values())


def _forward(model: Layers, adapter: Adapter, num_tokens: int, recompute: bool) -> Tensor:
    positions = torch.arange(num_tokens, device=model.device)
    return model.hidden(
        torch.zeros_like(positions),
        positions,
        arranged([Owner(0, num_tokens, adapter, backward=True)], model.dtype),
        packed_attention([num_tokens], model.device, model.dtype),
        recompute=recompute,
    )


def _never_unpacked(packed: None) -> Tensor:
    raise AssertionError("a forward that is only measured has no backward")
