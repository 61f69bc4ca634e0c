"""Key/value blocks are cleared before they are used again.

vLLM's CPU attention multiplies what it masks out by zero, and zero times nan is nan: a request
whose weights had diverged left blocks behind that made nan of whatever came into them next.
"""

from __future__ import annotations

from vllm.v1.kv_cache_interface import KVCacheConfig
from vllm.v1.worker.cpu_model_runner import CPUModelRunner


def install() -> None:
    KVCacheConfig.needs_kv_cache_zeroing = property(lambda self: True)
    # The CPU runner clears blocks by itself; the table of addresses is for a GPU kernel.
    CPUModelRunner._init_kv_zero_meta = lambda self: None
