"""The most memory that tensors take at once during a call, on whatever device."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch.profiler import ProfilerActivity, profile


def peak_bytes(device: torch.device, call: Callable[[], object]) -> int:
    """Beyond what lies there before. The first call of its kind also counts what stays."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        call()
        return torch.cuda.max_memory_allocated(device) - before
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        call()
    return max(_running_totals(profiled))


def _running_totals(profiled: profile) -> Iterator[int]:
    events = profiled.profiler.kineto_results.events()
    changes = [(e.start_ns(), e.nbytes()) for e in events if e.name() == "[memory]"]
    total = 0
    for _, change in sorted(changes, key=lambda timed: timed[0]):
        total += change
        yield total
