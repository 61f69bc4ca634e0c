"""The ranks of a group as processes of this machine, each at a socket of its own: it ends with the
coordinator because that closes, whatever it is doing."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading
from contextlib import suppress
from typing import IO

import msgspec

from backends.workers.messages import Call, Reply
from backends.workers.rank import Place, TrainerSpec
from backends.workers.rank_events import Answered, Events, Lost, meeting_place
from backends.workers.wire import Channel, MalformedFrameError

_ADDRESS = "127.0.0.1"
_EXIT_S = 5.0
"""How long a rank that closed its socket may take to be gone, and its last words to be read."""


class RankProcesses:
    def __init__(self, spec: TrainerSpec, events: Events) -> None:
        self._store = meeting_place(_ADDRESS)
        self._events = events
        self._ranks = [self._start(spec, rank) for rank in range(spec.world_size)]

    def send(self, call_id: int, call: Call) -> None:
        for rank in self._ranks:
            # One that is gone is told of by its reader.
            with suppress(OSError):
                rank.channel.send(call_id, call)

    def end(self) -> None:
        for rank in self._ranks:
            rank.process.kill()
        for rank in self._ranks:
            rank.process.wait()
            rank.relay.join(_EXIT_S)

    def _start(self, spec: TrainerSpec, number: int) -> _RankProcess:
        place = Place(rank=number, local_rank=number, store=(_ADDRESS, self._store.port))
        rank = _RankProcess(spec, place)
        reader = threading.Thread(target=self._read, args=(number, rank), daemon=True)
        reader.start()
        return rank

    def _read(self, number: int, rank: _RankProcess) -> None:
        try:
            while True:
                # No name for the reply here: it would live on until the next one comes.
                self._events.put(Answered(number, *rank.channel.receive()))
        except (EOFError, OSError):
            with suppress(subprocess.TimeoutExpired):
                rank.process.wait(_EXIT_S)
            self._events.put(Lost(number, f"ended with code {rank.process.poll()}"))
        except MalformedFrameError as error:
            self._events.put(Lost(number, f"sent a malformed reply: {error}"))


class _RankProcess:
    def __init__(self, spec: TrainerSpec, place: Place) -> None:
        ours, theirs = socket.socketpair()
        self.channel = Channel[Reply](ours, Reply)
        with theirs:
            self.process = subprocess.Popen(
                [
                    *(sys.executable, "-m", "backends.workers.rank"),
                    *("--fd", str(theirs.fileno())),
                    *("--spec", msgspec.json.encode(spec).decode()),
                    *("--place", msgspec.json.encode(place).decode()),
                ],
                pass_fds=[theirs.fileno()],
                # All of them are on this machine.
                env={"GLOO_SOCKET_IFNAME": "lo", **os.environ, **spec.environment},
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
            )
        self.relay = threading.Thread(
            target=_relay, args=(place.rank, self.process.stdout), daemon=True
        )
        self.relay.start()


def _relay(rank: int, output: IO[bytes]) -> None:
    """Its lines under its name, in our log."""
    for line in output:
        sys.stderr.write(f"rank {rank}: {line.decode(errors='replace')}")
        sys.stderr.flush()
