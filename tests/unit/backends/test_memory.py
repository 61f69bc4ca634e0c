"""How much memory is free, by what the system says of it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from backends import memory

GB = 2**30
CPU = torch.device("cpu")


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A machine with 8 GB available, and the folder of its control groups."""
    meminfo = tmp_path / "meminfo"
    kilobytes = 8 * GB // 1024
    meminfo.write_text(f"MemTotal: 64 kB\nMemFree: 32 kB\nMemAvailable:   {kilobytes} kB\n")
    monkeypatch.setattr(memory, "_MEMINFO", meminfo)
    monkeypatch.setattr(memory, "_CGROUP", tmp_path)
    return tmp_path


def _limit(folder: Path, limit: int | str, used: int, cache: int) -> None:
    (folder / "memory.max").write_text(f"{limit}\n")
    (folder / "memory.current").write_text(f"{used}\n")
    (folder / "memory.stat").write_text(f"anon {used - cache}\ninactive_file {cache}\n")


def test_without_a_limit_it_is_what_the_machine_has(machine):
    assert memory.free_bytes(CPU) == 8 * GB
    _limit(machine, "max", 3 * GB, GB)
    assert memory.free_bytes(CPU) == 8 * GB


def test_a_container_has_what_its_limit_leaves_and_its_file_cache(machine):
    _limit(machine, 6 * GB, 3 * GB, GB)
    assert memory.free_bytes(CPU) == 4 * GB


def test_a_limit_above_what_the_machine_has_does_not_count(machine):
    _limit(machine, 60 * GB, 3 * GB, GB)
    assert memory.free_bytes(CPU) == 8 * GB


def test_a_system_that_does_not_say_what_is_available_has_all_its_memory(machine, monkeypatch):
    (machine / "meminfo").unlink()
    pages = {"SC_PHYS_PAGES": 1000, "SC_PAGE_SIZE": 4096}
    monkeypatch.setattr(memory.os, "sysconf", pages.__getitem__)
    assert memory.free_bytes(CPU) == 4_096_000


def test_a_gpu_also_has_what_its_cache_does_not_use(monkeypatch):
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (5 * GB, 80 * GB))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 4 * GB)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: 3 * GB)
    assert memory.free_bytes(torch.device("cuda")) == 6 * GB
