"""One rank of a trainer that is divided among several processes: it meets the others, loads its
share of the model, and then answers every call in step with them.

Started by `rank_processes.py` (and `ray_ranks.py`, which hosts a `Rank` in an actor).
"""

from __future__ import annotations

import argparse
import importlib
import logging
import time
from datetime import timedelta
from queue import SimpleQueue

import msgspec
import torch
import torch.distributed as dist
from msgspec import Struct

from backends.model import UnsupportedModelError
from backends.training.trainer import Trainer
from backends.workers.messages import (
    READY_CALL,
    Broke,
    Call,
    Checked,
    CheckLoss,
    Done,
    Ready,
    Reply,
    TrainingCall,
)
from backends.workers.process import DTYPES, Connection, begin, device_named, explained
from backends.workers.training_calls import units

_log = logging.getLogger(__name__)

_SILENCE = timedelta(minutes=10)
"""A rank that others wait for in a collective for so long hangs: their call breaks, and the group
ends. Loading, where some read more than others, must fit in it."""


class TrainerSpec(Struct, frozen=True, kw_only=True):
    """What all ranks are made from."""

    trainer: str
    """Module with a function `load(model, *, dtype, device, max_tokens_per_microbatch,
    activation_checkpointing, device_run_bytes, **layout) -> Trainer`. All ranks call it at once, in
    a process group of them all."""
    model: str
    dtype: str
    device: str
    world_size: int
    threads: int
    """Of each rank."""
    max_tokens_per_microbatch: int
    activation_checkpointing: str
    device_run_bytes: int | None = None
    layout: dict[str, int | bool | str] = {}
    """What only this trainer is told: how the ranks divide the model."""

    @property
    def environment(self) -> dict[str, str]:
        """Of each rank's process."""
        return {"OMP_NUM_THREADS": str(self.threads), "HF_HUB_DISABLE_PROGRESS_BARS": "1"}


class Place(Struct, frozen=True, kw_only=True):
    """Where one rank is among the others."""

    rank: int
    local_rank: int
    """Which of the GPUs that its process sees is its own."""
    store: tuple[str, int]
    """Address and port of the TCPStore that the ranks meet at."""


class Rank:
    def __init__(self, spec: TrainerSpec, place: Place) -> None:
        """Returns when all ranks have met and this one's share is loaded."""
        began = time.monotonic()
        torch.set_num_threads(spec.threads)
        device = device_named(spec.device)
        if device.type == "cuda":
            device = torch.device("cuda", place.local_rank)
            torch.cuda.set_device(device)
        dist.init_process_group(
            "nccl" if device.type == "cuda" else "gloo",
            store=dist.TCPStore(*place.store, is_master=False),
            rank=place.rank,
            world_size=spec.world_size,
            timeout=_SILENCE,
        )
        self._leads = place.rank == 0
        self._trainer = _load(spec, device)
        _log.info("loaded %s in %.1f s", spec.model, time.monotonic() - began)

    def answer(self, call: Call) -> Reply:
        """What came of the call where this rank leads, else whether it broke."""
        try:
            reply = self._perform(call)
        except Exception as error:  # noqa: BLE001
            return Broke(explained(error))
        return reply if self._leads else Done()

    def _perform(self, call: Call) -> Reply:
        if isinstance(call, CheckLoss):
            return Checked(self._trainer.check_loss(call.loss))
        assert isinstance(call, TrainingCall), call
        work = units(self._trainer, call)
        while True:
            try:
                next(work)
            except StopIteration as end:
                return end.value


def loaded(spec: TrainerSpec, place: Place) -> Rank | Broke:
    """The rank, or why the model cannot be divided as it was said: the same on all of them."""
    try:
        return Rank(spec, place)
    except UnsupportedModelError as error:
        return Broke(str(error))


def _load(spec: TrainerSpec, device: torch.device) -> Trainer:
    return importlib.import_module(spec.trainer).load(
        spec.model,
        dtype=DTYPES[spec.dtype],
        device=device,
        max_tokens_per_microbatch=spec.max_tokens_per_microbatch,
        activation_checkpointing=spec.activation_checkpointing,
        device_run_bytes=spec.device_run_bytes,
        **spec.layout,
    )


def main() -> None:
    parser = argparse.ArgumentParser(prog="backends.workers.rank", description=__doc__)
    parser.add_argument("--fd", type=int, required=True, help="our end of a Unix socket pair")
    parser.add_argument("--spec", required=True, help="a TrainerSpec, as JSON")
    parser.add_argument("--place", required=True, help="a Place, as JSON")
    arguments = parser.parse_args()
    begin("worker")
    inbox: SimpleQueue[tuple[int, Call]] = SimpleQueue()
    connection = Connection(arguments.fd, inbox.put)
    rank = loaded(
        msgspec.json.decode(arguments.spec, type=TrainerSpec),
        msgspec.json.decode(arguments.place, type=Place),
    )
    connection.send(READY_CALL, rank if isinstance(rank, Broke) else Ready())
    while isinstance(rank, Rank):
        _answer(rank, connection, *inbox.get())


def _answer(rank: Rank, connection: Connection, call_id: int, call: Call) -> None:
    """A function of its own, so that nothing of the call outlives it."""
    connection.send(call_id, rank.answer(call))


if __name__ == "__main__":
    main()
