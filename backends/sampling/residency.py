"""Which adapters are in memory: loaded once by folder, the least recently used leave first."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable

from backends.lora.adapter import Adapter


class AdapterResidency:
    """Adapters by folder under a byte budget. Whoever runs with an adapter holds it itself, so
    an eviction never pulls it from under a request; the newest one always stays."""

    def __init__(self, load: Callable[[str], Adapter], max_bytes: int) -> None:
        self._load = load
        self._max_bytes = max_bytes
        self._resident: OrderedDict[str, Adapter] = OrderedDict()
        self._num_bytes = 0

    def get(self, folder: str) -> Adapter:
        """Raises what the loader raises for a folder that holds no adapter."""
        if folder in self._resident:
            self._resident.move_to_end(folder)
            return self._resident[folder]
        adapter = self._load(folder)
        self._resident[folder] = adapter
        self._num_bytes += adapter_bytes(adapter)
        while self._num_bytes > self._max_bytes and len(self._resident) > 1:
            _, evicted = self._resident.popitem(last=False)
            self._num_bytes -= adapter_bytes(evicted)
        return adapter

    def __contains__(self, folder: str) -> bool:
        return folder in self._resident


def adapter_bytes(adapter: Adapter) -> int:
    return sum(t.numel() * t.element_size() for _, t in adapter.named_tensors())
