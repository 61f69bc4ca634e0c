"""Which replica a request goes to. Pure: no clocks, no IO."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

OVERLOAD_SAMPLES = 32
"""A session leaves its replica when another has this many fewer samples to generate."""


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
    stuck_to: str | None
    """The replica its session has used last."""


Choose = Callable[[Sequence[ReplicaView], RoutedRequest], str]
"""Gives the name of one of the replicas, of which there is at least one."""


def choose(replicas: Sequence[ReplicaView], request: RoutedRequest) -> str:
    """The session's own replica, unless that is gone or overloaded; else the least loaded of those
    that hold the adapter, unless all of them are overloaded; else the least loaded of all."""
    least = min(replica.load for replica in replicas)
    fit = [replica for replica in replicas if replica.load - least < OVERLOAD_SAMPLES]
    own = [replica for replica in fit if replica.name == request.stuck_to]
    holding = [r for r in fit if request.adapter is None or request.adapter in r.adapters]
    return min(own or holding or fit, key=lambda replica: (replica.load, replica.name)).name
