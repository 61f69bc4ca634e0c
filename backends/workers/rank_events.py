"""What the coordinator of a group hears, and what it asks of whatever hosts the ranks."""

from __future__ import annotations

import socket
from queue import SimpleQueue
from typing import NamedTuple, Protocol

import torch.distributed as dist

from backends.workers.messages import Call, Reply


class Called(NamedTuple):
    """By the service."""

    call_id: int
    call: Call


class Answered(NamedTuple):
    """One rank did."""

    rank: int
    call_id: int
    reply: Reply


class Lost(NamedTuple):
    """One rank is gone."""

    rank: int
    why: str


Events = SimpleQueue[Called | Answered | Lost]


class RankHost(Protocol):
    """Has started the ranks, and puts what becomes of them into the events it was given: from
    each an answer to `READY_CALL`, one to every call that was sent, and its loss."""

    def send(self, call_id: int, call: Call) -> None:
        """To every rank."""
        ...

    def end(self) -> None:
        """Kill all ranks. When it returns they are gone, and what they said is in the log."""
        ...


def meeting_place(address: str) -> dist.TCPStore:
    """A store at a free port that nobody reaches but by this address of ours."""
    listener = socket.create_server((address, 0))
    port = listener.getsockname()[1]
    return dist.TCPStore(
        address, port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach()
    )
