"""Which replica a request goes to. Pure: no clocks, no IO."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from hashlib import blake2b

OVERLOAD_SAMPLES = 32
"""A session leaves its replica when another has this many fewer samples to generate. Good values
lie between a quarter and the whole of what a replica runs at once: backends/README.md, Routing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaView:
    """What the choice knows of a replica that can take requests."""

    name: str
    load: int
    """Samples sent to it and not finished."""
    adapters: frozenset[str]
    """Folders that it holds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RoutedRequest:
    adapter: str | None
    """None: the base model, which every replica holds."""
    session: str
    """Of a request without a session, what names the request. Decides between equal replicas."""
    stuck_to: str | None
    """The replica its session has used last."""


Choose = Callable[[Sequence[ReplicaView], RoutedRequest], str]
"""Gives the name of one of the replicas, of which there is at least one."""


def choose(
    replicas: Sequence[ReplicaView],
    request: RoutedRequest,
    *,
    overload_samples: int = OVERLOAD_SAMPLES,
) -> str:
    """The session's own replica, unless that is gone or overloaded; else the least loaded of those
    that hold the adapter, unless all of them are overloaded; else the least loaded of all."""
    least = min(replica.load for replica in replicas)
    fit = [replica for replica in replicas if replica.load - least < overload_samples]
    own = [replica for replica in fit if replica.name == request.stuck_to]
    holding = [r for r in fit if request.adapter is None or request.adapter in r.adapters]
    least_loaded = min(
        own or holding or fit, key=lambda r: (r.load, _rank(request.session, r.name))
    )
    return least_loaded.name


def _rank(session: str, replica: str) -> bytes:
    """Rendezvous hashing: every session has an order of the replicas of its own."""
    return blake2b(f"{session}\0{replica}".encode(), digest_size=8).digest()
