"""The worker's one compute thread: training calls in their order, samples together, and both by
turns (`TimeShare`), a microbatch or a token at a time."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from queue import SimpleQueue

from backends.contract import BackendError, Failure, SampleRequest, SampleResult
from backends.sampling.embedded import EmbeddedEngine
from backends.training.trainer import Trainer
from backends.workers import messages
from backends.workers.messages import Call, Reply
from backends.workers.process import explained
from backends.workers.time_share import TimeShare
from backends.workers.training_calls import Units, units

Inbox = SimpleQueue[tuple[int, Call]]


class Compute:
    def __init__(
        self, trainer: Trainer, engine: EmbeddedEngine, send: Callable[[int, Reply], None]
    ) -> None:
        self._trainer = trainer
        self._engine = engine
        self._send = send
        self._share = TimeShare()
        self._training: deque[tuple[int, Units]] = deque()
        self._sampling: dict[str, int] = {}
        """Call id by request id."""
        self._stopping = False

    def run(self, inbox: Inbox) -> None:
        """Work until told to stop."""
        work = {"training": self._train, "sampling": self._sample}
        while not self._stopping:
            ready = self._ready()
            if not ready or not inbox.empty():
                self._accept(*inbox.get())
                continue
            name = self._share.choose(ready)
            began = time.perf_counter()
            work[name]()
            self._share.spend(name, time.perf_counter() - began)

    def _ready(self) -> list[str]:
        ready = ["training"] if self._training else []
        return [*ready, "sampling"] if self._engine.busy else ready

    def _accept(self, call_id: int, call: Call) -> None:
        match call:
            case messages.Sample(request, stream):
                self._attempt(
                    lambda: self._add(call_id, request, stream),
                    lambda message: self._send(call_id, messages.Broke(message)),
                )
            case messages.Cancel(request_id):
                self._engine.cancel(request_id)
                # Before the next call, which may be a new request of the same id.
                self._report(self._engine.take_finished())
                self._send(call_id, messages.Done())
            case messages.Update(old, new):
                self._attempt(
                    lambda: self._update(call_id, old, new),
                    lambda message: self._send(call_id, messages.Broke(message)),
                )
            case messages.CheckLoss(loss):
                self._attempt(
                    lambda: self._send(call_id, messages.Checked(self._trainer.check_loss(loss))),
                    lambda message: self._send(call_id, messages.Broke(message)),
                )
            case messages.Stop():
                self._stopping = True
            case _:
                self._training.append((call_id, units(self._trainer, call)))

    def _add(self, call_id: int, request: SampleRequest, stream: bool) -> None:
        if request.request_id in self._sampling:
            raise BackendError(f"request {request.request_id} is under way already")
        self._engine.add(request)
        if stream:
            self._engine.progress.follow(request.request_id)
        self._sampling[request.request_id] = call_id

    def _train(self) -> None:
        self._attempt(self._train_one_unit, self._break_training)

    def _train_one_unit(self) -> None:
        call_id, units = self._training[0]
        try:
            next(units)
        except StopIteration as end:
            self._training.popleft()
            self._send(call_id, end.value)

    def _sample(self) -> None:
        self._attempt(self._sample_one_step, self._break_sampling)

    def _sample_one_step(self) -> None:
        finished = self._engine.step()
        for request_id, deltas in self._engine.progress.take():
            self._send(self._sampling[request_id], messages.Progressed(deltas))
        self._report(finished)

    def _update(self, call_id: int, old: str, new: str) -> None:
        self._engine.update(old, new)
        self._send(call_id, messages.Done())

    def _report(self, finished: Sequence[tuple[str, SampleResult | Failure]]) -> None:
        for request_id, result in finished:
            self._send(self._sampling.pop(request_id), messages.sampled(result))

    def _attempt(self, work: Callable[[], None], broke: Callable[[str], None]) -> None:
        """The worker's one supervision: what breaks fails its own calls, and the rest goes on."""
        try:
            work()
        except Exception as error:  # noqa: BLE001
            broke(explained(error))

    def _break_training(self, message: str) -> None:
        call_id, _ = self._training.popleft()
        self._send(call_id, messages.Broke(message))

    def _break_sampling(self, message: str) -> None:
        """A step serves all requests at once: nothing is known of any of them."""
        self._engine.abort()
        for call_id in self._sampling.values():
            self._send(call_id, messages.Broke(message))
        self._sampling.clear()
