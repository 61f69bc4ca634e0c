"""How much memory is left, and telling that it ran out."""

from __future__ import annotations

import os
from pathlib import Path

import torch

_MEMINFO = Path("/proc/meminfo")
_CGROUP = Path("/sys/fs/cgroup")


def is_out_of_memory(error: RuntimeError) -> bool:
    """torch has a class for accelerators; its CPU allocator only has words."""
    return isinstance(error, torch.OutOfMemoryError) or "can't allocate memory" in str(error)


def free_bytes(device: torch.device) -> float:
    """What could be allocated on the device now."""
    if device.type == "cuda":
        unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return torch.cuda.mem_get_info(device)[0] + unused
    return min(_free_of_machine(_MEMINFO), _free_of_container(_CGROUP))


def _free_of_machine(meminfo: Path) -> int:
    """What Linux calls available. Other systems do not say, and swap: all that they have."""
    if not meminfo.exists():
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    lines = dict(line.split(":", 1) for line in meminfo.read_text().splitlines())
    return 1024 * int(lines["MemAvailable"].split()[0])


def _free_of_container(cgroup: Path) -> float:
    """What its limit leaves, its file cache counted as free; infinite where there is none."""
    limit = cgroup / "memory.max"
    if not limit.exists() or limit.read_text().strip() == "max":
        return float("inf")
    cache = dict(line.split() for line in (cgroup / "memory.stat").read_text().splitlines())
    used = int((cgroup / "memory.current").read_text()) - int(cache["inactive_file"])
    return int(limit.read_text()) - used
