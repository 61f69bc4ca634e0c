"""What is counted, in Prometheus's text format. It is read where it is kept, at every scrape."""

from __future__ import annotations

from collections.abc import Iterator
from typing import get_args

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4 as CONTENT_TYPE
from prometheus_client.registry import Collector

from backends.contract import ReplicaState
from server.api.rooms import Rooms
from server.dispatch.trainers import TrainerState

__all__ = ["CONTENT_TYPE", "render"]

_OF_A_MODEL = ("model",)
_OF_A_TRAINER = ("model", "trainer")
_OF_A_REPLICA = ("model", "replica")


def render(rooms: Rooms) -> bytes:
    registry = CollectorRegistry()
    registry.register(_Rooms(rooms))
    return generate_latest(registry)


class _Rooms(Collector):
    def __init__(self, rooms: Rooms) -> None:
        self._rooms = rooms

    def collect(self) -> Iterator[Metric]:
        on = GaugeMetricFamily("hearth_maintenance", "Whether nothing new begins.")
        on.add_metric([], self._rooms.maintenance)
        yield on
        yield from self._training()
        yield from self._samplers()
        yield from self._replicas()

    def _training(self) -> Iterator[Metric]:
        of = _OF_A_TRAINER
        ticks = CounterMetricFamily("hearth_ticks", "Calls to the trainer.", labels=of)
        tokens = CounterMetricFamily("hearth_tokens", "Tokens in them.", labels=of)
        runs = GaugeMetricFamily("hearth_trainer_runs", "Runs that belong to it.", labels=of)
        waiting = GaugeMetricFamily("hearth_trainer_waiting", "Requests of theirs.", labels=of)
        state = GaugeMetricFamily(
            "hearth_trainer_state", "1 for the state it is in.", labels=(*of, "state")
        )
        arrivals = CounterMetricFamily(
            "hearth_trainer_arrivals", "Runs that came from another.", labels=of
        )
        restarts = CounterMetricFamily(
            "hearth_trainer_restarts", "Starts but the first.", labels=of
        )
        for status in self._rooms.trainers.statuses():
            labels = [status.model, status.name]
            ticks.add_metric(labels, status.ticks)
            tokens.add_metric(labels, status.tokens)
            runs.add_metric(labels, len(status.runs))
            waiting.add_metric(labels, status.waiting)
            arrivals.add_metric(labels, status.arrivals)
            restarts.add_metric(labels, max(status.generation - 1, 0))
            for name in get_args(TrainerState):
                state.add_metric([*labels, name], status.state == name)
        yield from (ticks, tokens, runs, waiting, state, arrivals, restarts)

    def _samplers(self) -> Iterator[Metric]:
        up = GaugeMetricFamily("hearth_sampler_up", "Whether it is there.", labels=_OF_A_MODEL)
        restarts = CounterMetricFamily(
            "hearth_sampler_restarts", "Starts but the first.", labels=_OF_A_MODEL
        )
        for worker in self._rooms.sampling_workers():
            up.add_metric([worker.model], worker.alive)
            restarts.add_metric([worker.model], max(worker.generation - 1, 0))
        yield from (up, restarts)

    def _replicas(self) -> Iterator[Metric]:
        load = GaugeMetricFamily("hearth_replica_load", "Samples under way.", labels=_OF_A_REPLICA)
        adapters = GaugeMetricFamily(
            "hearth_replica_adapters", "Adapters that it holds.", labels=_OF_A_REPLICA
        )
        state = GaugeMetricFamily(
            "hearth_replica_state", "1 for the state it is in.", labels=(*_OF_A_REPLICA, "state")
        )
        requests = CounterMetricFamily(
            "hearth_replica_requests", "Requests sent to it.", labels=_OF_A_REPLICA
        )
        lost = CounterMetricFamily(
            "hearth_replica_lost_requests", "Requests that went down with it.", labels=_OF_A_REPLICA
        )
        restarts = CounterMetricFamily(
            "hearth_replica_restarts", "Starts but the first.", labels=_OF_A_REPLICA
        )
        for model, status in self._rooms.replicas.all():
            labels = [model, status.name]
            load.add_metric(labels, status.load)
            adapters.add_metric(labels, len(status.adapters))
            requests.add_metric(labels, status.requests)
            lost.add_metric(labels, status.lost_requests)
            restarts.add_metric(labels, max(status.generation - 1, 0))
            for name in get_args(ReplicaState):
                state.add_metric([*labels, name], status.state == name)
        yield from (load, adapters, state, requests, lost, restarts)
