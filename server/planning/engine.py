"""What each GPU of a vLLM replica holds, and how much is left for keys and values."""

from __future__ import annotations

from dataclasses import dataclass

from server.planning import layouts
from server.planning.linears import GROUPS
from server.planning.shapes import ModelShape

WORKSPACE_BYTES = 6 << 30
"""For CUDA graphs, the activations of a batch, the CUDA context: an assumption."""

GPUS_OF_REPLICA = (1, 2, 4, 8)

LARGEST_SHARE = 0.92
"""Of a GPU's memory: vLLM's own default."""

EMBEDDED_TOKENS = 65_536
"""What the embedded engine caches at most (`kv_token_budget` of a worker)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Serving:
    """What vLLM is started with."""

    loras: int
    """`engine_max_loras`"""
    lora_rank: int
    """`engine_max_lora_rank`"""
    context: int
    """Tokens of the longest sequence; vLLM does not start without room for one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaMemory:
    """Bytes on each of its `gpus`."""

    gpus: int
    base: int
    lora_slots: int
    """Set aside for the largest rank on every layer, whatever the adapters are."""
    kv_token: int
    least: int
    """With the workspace, and keys and values of the longest sequence."""

    def kv_tokens(self, available: float) -> int:
        """Of how many tokens the keys and values fit."""
        room = available - self.base - self.lora_slots - WORKSPACE_BYTES
        return max(0, int(room // self.kv_token))


def kv_bytes(shape: ModelShape, dtype_bytes: int, gpus: int = 1) -> int:
    """Keys and values of a token, on each of the GPUs that share the heads."""
    heads = -(-shape.num_kv_heads // gpus)
    return 2 * shape.num_layers * heads * shape.head_dim * dtype_bytes


def replica(shape: ModelShape, serving: Serving, dtype_bytes: int, gpus: int) -> ReplicaMemory:
    numbers = serving.loras * layouts.adapter_numbers(shape, serving.lora_rank, GROUPS)
    base = layouts.base_parameters(shape) * dtype_bytes // gpus
    slots = numbers * dtype_bytes // gpus
    kv_token = kv_bytes(shape, dtype_bytes, gpus)
    return ReplicaMemory(
        gpus=gpus,
        base=base,
        lora_slots=slots,
        kv_token=kv_token,
        least=base + slots + WORKSPACE_BYTES + serving.context * kv_token,
    )


def smallest_replica(
    shape: ModelShape, serving: Serving, dtype_bytes: int, *, gpus: int, gpu_bytes: float
) -> ReplicaMemory | None:
    """On the fewest GPUs, of `gpus` at most, that have `gpu_bytes` each for it."""
    for count in GPUS_OF_REPLICA:
        one = replica(shape, serving, dtype_bytes, count)
        if count <= gpus and shape.num_heads % count == 0 and one.least <= gpu_bytes:
            return one
    return None
