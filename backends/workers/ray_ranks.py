"""The ranks of a group as Ray actors, packed on as few machines as there is room on. They end with
the coordinator, which is their driver."""

from __future__ import annotations

import logging
import os
import socket
import sys
import threading
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any

# What Ray reads when it is imported: no word to its makers, and every line of every actor.
os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
os.environ.setdefault("RAY_DEDUP_LOGS", "0")
os.environ.setdefault("RAY_COLOR_PREFIX", "0")
os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")

import numpy as np
import ray
from ray.util.placement_group import PlacementGroup, placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from backends.workers.coordinator import GroupLostError
from backends.workers.messages import READY_CALL, Broke, Call, Ready, Reply
from backends.workers.process import begin
from backends.workers.rank import Place, TrainerSpec, loaded
from backends.workers.rank_events import Answered, Events, Lost, meeting_place
from backends.workers.wire import Decoder, packed, unpacked

_LOOPBACK = "127.0.0.1"
_KNOCK_S = 10.0
_ROOM_S = 60.0
"""How long a cluster may take to find room for the ranks."""


class RayRanks:
    def __init__(self, spec: TrainerSpec, events: Events, address: str) -> None:
        """`address` is of a cluster (HOST:PORT, or `auto` for the one of this machine), or `local`
        for one of our own that nobody else reaches. Raises GroupLostError when it has no room."""
        self._events = events
        self._decoder = Decoder[Reply](Reply)
        self._decoding = threading.Lock()
        _join(address, spec)
        ours = ray.util.get_node_ip_address()
        self._store = meeting_place(ours)
        self._actors = _actors(spec, (ours, self._store.port))
        for rank, actor in enumerate(self._actors):
            self._when_done(rank, actor.load.remote(), self._hear)
            self._when_done(rank, actor.watch.options(concurrency_group="watch").remote(), None)

    def send(self, call_id: int, call: Call) -> None:
        # Once into the object store, however many ranks read it there.
        frame = ray.put(packed(call_id, call))
        for rank, actor in enumerate(self._actors):
            self._when_done(rank, actor.answer.remote(frame), self._hear)

    def end(self) -> None:
        for actor in self._actors:
            ray.kill(actor)
        ray.shutdown()

    def _when_done(
        self, rank: int, result: ray.ObjectRef, hear: Callable[[int, np.ndarray], None] | None
    ) -> None:
        def done(future: Future[np.ndarray]) -> None:
            error = future.exception()
            if error is not None:
                self._events.put(Lost(rank, f"failed: {error}"))
            elif hear is not None:
                hear(rank, future.result())

        result.future().add_done_callback(done)

    def _hear(self, rank: int, frame: np.ndarray) -> None:
        with self._decoding:
            self._events.put(Answered(rank, *unpacked(frame, self._decoder)))


class RankActor:
    """Its name in the log is its representation."""

    def __init__(self, spec: TrainerSpec, place: Place) -> None:
        begin("worker")
        self._spec = spec
        self._place = place
        self._decoder = Decoder[Call](Call)

    def __repr__(self) -> str:
        return f"rank {self._place.rank}"

    def load(self) -> np.ndarray:
        rank = loaded(self._spec, self._place)
        if isinstance(rank, Broke):
            return packed(READY_CALL, rank)
        self._rank = rank
        return packed(READY_CALL, Ready())

    def answer(self, frame: np.ndarray) -> np.ndarray:
        call_id, call = unpacked(frame, self._decoder)
        return packed(call_id, self._rank.answer(call))

    def watch(self) -> None:
        """For ever: whoever waits for it learns of this process's end at once."""
        threading.Event().wait()


def _join(address: str, spec: TrainerSpec) -> None:
    options: dict[str, Any] = {}
    if address == "local":
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        options = {
            "num_cpus": max(spec.world_size * spec.threads, os.cpu_count() or 1),
            "include_dashboard": False,
            "_node_ip_address": _LOOPBACK,
        }
    elif address != "auto":
        _knock(address)
    ray.init(address, logging_level=logging.WARNING, runtime_env=_environment(spec), **options)


def _knock(address: str) -> None:
    """Ray itself tries for ever. Raises GroupLostError."""
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host, int(port)), timeout=_KNOCK_S).close()
    except (OSError, ValueError) as error:
        raise GroupLostError(f"no Ray cluster answers at {address}: {error}") from error


def _environment(spec: TrainerSpec) -> dict[str, Any]:
    """That of the coordinator: its Python, and this package from where it has it."""
    variables = {**spec.environment, "PYTHONPATH": str(Path(__file__).parents[2])}
    return {"py_executable": sys.executable, "env_vars": variables}


def _actors(spec: TrainerSpec, store: tuple[str, int]) -> list[Any]:
    resources = {"CPU": spec.threads}
    if spec.device == "cuda" or (spec.device == "auto" and ray.cluster_resources().get("GPU")):
        resources["GPU"] = 1
    room = _room(spec.world_size, resources)
    options: dict[str, Any] = {
        "num_cpus": resources["CPU"],
        "num_gpus": resources.get("GPU", 0),
        "concurrency_groups": {"watch": 1},
    }
    make = ray.remote(**options)(RankActor)
    return [
        make.options(
            scheduling_strategy=PlacementGroupSchedulingStrategy(
                room, placement_group_bundle_index=rank
            )
            # Ray shows it no GPU but its own.
        ).remote(spec, Place(rank=rank, local_rank=0, store=store))
        for rank in range(spec.world_size)
    ]


def _room(num_ranks: int, resources: dict[str, int]) -> PlacementGroup:
    room = placement_group([resources] * num_ranks, strategy="PACK")
    if not room.wait(_ROOM_S):
        raise GroupLostError(
            f"Ray found no room for {num_ranks} ranks of {resources} in {_ROOM_S:.0f} s; "
            f"it has {ray.cluster_resources()}"
        )
    return room
