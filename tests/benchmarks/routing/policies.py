"""The policies that are compared. Each is made anew for a simulation, since some count."""

from __future__ import annotations

from bisect import bisect
from collections.abc import Sequence
from functools import partial
from hashlib import blake2b
from itertools import count

from backends.sampling.vllm.routing import Choose, ReplicaView, RoutedRequest, choose

_POINTS = 100
"""On the ring, of each replica."""


def ours(overload_samples: int) -> Choose:
    return partial(choose, overload_samples=overload_samples)


def consistent_hashing() -> Choose:
    """The next point on a ring, after that of the session."""

    def on_ring(replicas: Sequence[ReplicaView], request: RoutedRequest) -> str:
        names = [replica.name for replica in replicas]
        ring = sorted((_place(f"{name} {i}"), name) for name in names for i in range(_POINTS))
        return ring[bisect(ring, (_place(request.session), "")) % len(ring)][1]

    return on_ring


def round_robin() -> Choose:
    turn = count()

    def next_one(replicas: Sequence[ReplicaView], request: RoutedRequest) -> str:
        return replicas[next(turn) % len(replicas)].name

    return next_one


def least_loaded() -> Choose:
    """Without affinity; between equals by turns."""
    turn = count()

    def least(replicas: Sequence[ReplicaView], request: RoutedRequest) -> str:
        first = next(turn) % len(replicas)
        return min([*replicas[first:], *replicas[:first]], key=lambda r: r.load).name

    return least


def _place(text: str) -> int:
    return int.from_bytes(blake2b(text.encode(), digest_size=8).digest())
