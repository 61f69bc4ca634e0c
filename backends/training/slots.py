"""Which runs lie on an accelerator, under a budget of bytes: the others wait in host memory."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import Generic, Protocol, TypeVar

import torch
from torch import Tensor


def moved(tensor: Tensor, device: torch.device) -> Tensor:
    """The tensor on the device; itself if it is there. Host memory is pinned, so that the way
    back is one copy which nobody waits for."""
    if device.type != "cpu" or tensor.device.type != "cuda":
        return tensor.to(device, non_blocking=True)
    host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    return host.copy_(tensor)


class Movable(Protocol):
    @property
    def device(self) -> torch.device: ...

    @property
    def num_bytes(self) -> int: ...

    def move(self, device: torch.device) -> None: ...


_Run = TypeVar("_Run", bound=Movable)


class Slots(Generic[_Run]):
    """Moves the least recently used runs out and those that a call needs back in. On a CPU, where
    both are the same memory, it does nothing."""

    def __init__(self, runs: dict[str, _Run], device: torch.device, max_bytes: int | None) -> None:
        """`runs` is the owner's, who adds and removes; here it is kept in the order of use."""
        self._runs = runs
        self._device = device
        self._host = torch.device("cpu")
        self._max_bytes = max_bytes

    def use(self, names: Collection[str]) -> None:
        """Bring these runs to the device, and others away from it as far as the budget asks for.
        Those of one call stay together even where they are more than it allows."""
        if self._device == self._host:
            return
        for name in names:
            self._runs[name] = self._runs.pop(name)  # the last are the most recently used
        if self._max_bytes is not None:
            self._leave(names, self._max_bytes)
        for name in names:
            self._runs[name].move(self._device)

    def make_room(self, names: Collection[str]) -> bool:
        """Move all but these away; whether there were any."""
        return self._leave(names, 0)

    def _leave(self, staying: Collection[str], max_bytes: int) -> bool:
        others = list(self._others(staying))
        used = sum(run.num_bytes for run in others) + sum(
            self._runs[name].num_bytes for name in staying
        )
        moved = False
        for run in others:
            if used <= max_bytes:
                break
            used -= run.num_bytes
            run.move(self._host)
            moved = True
        return moved

    def _others(self, staying: Collection[str]) -> Iterator[_Run]:
        """On the device, the least recently used first."""
        return (
            run
            for name, run in self._runs.items()
            if name not in staying and run.device != self._host
        )
