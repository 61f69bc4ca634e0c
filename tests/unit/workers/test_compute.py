"""The compute thread without a process around it, with stand-ins for trainer and engine."""

from __future__ import annotations

import weakref
from collections.abc import Generator, Sequence
from queue import SimpleQueue

import numpy as np

from backends.contract import Datum, Failure, ForwardBackward, SampleRequest
from backends.sampling.progress import Progress
from backends.workers import messages
from backends.workers.compute import Compute
from backends.workers.messages import Broke, Reply

NOTHING = Failure(message="nothing was computed", category="server")


class Trainer:
    """A pass takes as many units as it has requests."""

    def __init__(self, log: list[str]) -> None:
        self.log = log

    def forward_backward(
        self, requests: Sequence[ForwardBackward]
    ) -> Generator[None, None, list[Failure]]:
        for request in requests:
            self.log.append(request.run)
            yield
        return [NOTHING] * len(requests)

    def unload(self, run: str) -> None:
        self.log.append(f"unload {run}")


class Engine:
    """Needs as many steps as the longest request has tokens."""

    def __init__(self, log: list[str]) -> None:
        self.log = log
        self.left: dict[str, int] = {}
        self.progress = Progress()

    @property
    def busy(self) -> bool:
        return bool(self.left)

    def add(self, request: SampleRequest) -> None:
        self.left[request.request_id] = request.max_tokens

    def cancel(self, request_id: str) -> None:
        self.left[request_id] = 0

    def take_finished(self) -> list[tuple[str, Failure]]:
        done = [name for name, left in self.left.items() if left <= 0]
        for name in done:
            del self.left[name]
        return [(name, NOTHING) for name in done]

    def step(self) -> list[tuple[str, Failure]]:
        self.log.append("step")
        if "explosive" in self.left:
            raise RuntimeError("boom")
        self.left = {name: left - 1 for name, left in self.left.items()}
        return self.take_finished()

    def abort(self) -> None:
        self.left.clear()


def forward_backward(*runs: str) -> messages.RunForwardBackward:
    datum = Datum(tokens=np.zeros(2, np.int64), loss_inputs={})
    return messages.RunForwardBackward(
        tuple(ForwardBackward(run=run, data=(datum,), loss="x") for run in runs)
    )


def sample(name: str, max_tokens: int = 3) -> messages.Sample:
    return messages.Sample(
        SampleRequest(
            request_id=name, prompt=np.zeros(1, np.int64), num_samples=1, max_tokens=max_tokens
        )
    )


def run(*calls: messages.Call) -> tuple[list[str], dict[int, Reply]]:
    """What was done in which order, and the replies by call number from 1. Ends when every call
    has its reply."""
    log: list[str] = []
    replies: dict[int, Reply] = {}
    inbox = SimpleQueue()

    def send(call_id: int, reply: Reply) -> None:
        replies[call_id] = reply
        if len(replies) == len(calls):
            inbox.put((0, messages.Stop()))

    for call_id, call in enumerate(calls, 1):
        inbox.put((call_id, call))
    Compute(Trainer(log), Engine(log), send).run(inbox)  # pyrefly: ignore
    return log, replies


def test_training_calls_keep_their_order_and_samples_come_between():
    log, replies = run(
        forward_backward("a", "b", "c"),
        messages.Unload("a"),
        sample("q", 3),
        forward_backward("d"),
    )
    assert [entry for entry in log if entry != "step"] == ["a", "b", "c", "unload a", "d"]
    assert "step" in log[: log.index("d")]
    assert replies[1] == messages.Losses((messages.Failed(NOTHING),) * 3)
    assert replies[3] == messages.Failed(NOTHING)


def test_a_broken_step_fails_the_samples_and_not_the_training():
    _, replies = run(sample("quiet"), sample("explosive"), forward_backward("a", "b"))
    assert replies[1] == replies[2] == Broke("RuntimeError: boom")
    assert replies[3] == messages.Losses((messages.Failed(NOTHING),) * 2)


def test_a_request_id_that_is_under_way_is_refused():
    _, replies = run(sample("q"), sample("q"))
    assert replies[2] == Broke("request q is under way already")
    assert replies[1] == messages.Failed(NOTHING)


def test_a_cancelled_id_can_be_used_again_at_once():
    log, replies = run(sample("q", 50), messages.Cancel("q"), sample("q", 1))
    assert isinstance(replies[3], messages.Failed)
    assert len(log) == 1


def test_a_calls_arrays_are_free_once_it_is_answered():
    inbox, alive = SimpleQueue(), list[bool]()
    call = forward_backward("a")
    tokens = weakref.ref(call.requests[0].data[0].tokens)
    inbox.put((1, call))
    del call

    class Idle(SimpleQueue):
        def get(self, *args, **kwargs):
            if inbox.empty():
                alive.append(tokens() is not None)
                return (2, messages.Stop())
            return inbox.get()

        def empty(self) -> bool:
            return inbox.empty()

    Compute(Trainer([]), Engine([]), lambda *_: None).run(Idle())  # pyrefly: ignore
    assert alive == [False]
