"""A worker process: one base model, its trainer and its sampling engine, behind one socket.

Started by `subprocess.py`; it ends when the other end of the socket is closed, however that came
about. The terminal's Ctrl-C is not for it: whoever started it decides.
"""

from __future__ import annotations

import argparse
import logging
import os
import signal
import socket
import sys
import threading
import time
from queue import SimpleQueue
from typing import cast, get_args

import torch
from transformers import AutoTokenizer
from transformers.utils import logging as transformers_logging

from backends.model import FrozenModel
from backends.sampling.embedded import EmbeddedEngine
from backends.sampling.stops import Decoder
from backends.training.activations import Checkpointing
from backends.training.local import local_trainer
from backends.training.trainer import Trainer
from backends.workers.compute import Compute, Inbox
from backends.workers.messages import READY_CALL, Broke, Call, Ready, Reply
from backends.workers.wire import Channel, MalformedFrameError

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}

_log = logging.getLogger(__name__)


class _OneLine(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        return super().format(record).replace("\n", " | ")


class Connection:
    """The socket, read by one thread of its own from the start, so that even a worker that is
    busy or still loading leaves as soon as nobody listens."""

    def __init__(self, fd: int) -> None:
        self.inbox: Inbox = SimpleQueue()
        self._channel = Channel[Call](socket.socket(fileno=fd), Call)
        self._sending = threading.Lock()
        threading.Thread(target=self._receive, name="receive", daemon=True).start()

    def send(self, call_id: int, reply: Reply) -> None:
        try:
            with self._sending:
                self._channel.send(call_id, reply)
        except OSError:
            _leave()

    def _receive(self) -> None:
        while True:
            try:
                # No name for the call here: it would live on until the next one comes.
                self.inbox.put(self._channel.receive())
            except MalformedFrameError as error:
                _log.warning("malformed call %d: %s", error.call_id, error)
                self.send(error.call_id, Broke(f"malformed call: {error}"))
            except (EOFError, OSError):
                _leave()


def _leave() -> None:
    """At once, in the middle of a pass too: saved folders are whole or absent at any moment."""
    os._exit(0)


def load(arguments: argparse.Namespace) -> tuple[Trainer, EmbeddedEngine]:
    began = time.monotonic()
    transformers_logging.disable_progress_bar()
    model = FrozenModel.load(arguments.model, DTYPES[arguments.dtype], arguments.device)
    trainer = local_trainer(
        model,
        arguments.max_tokens_per_microbatch,
        arguments.activation_checkpointing,
        arguments.device_run_bytes,
    )
    engine = EmbeddedEngine(
        model,
        cast(Decoder, AutoTokenizer.from_pretrained(arguments.model)),
        max_batch_size=arguments.max_batch_size,
        kv_token_budget=arguments.kv_token_budget,
    )
    _log.info("loaded %s in %.1f s", arguments.model, time.monotonic() - began)
    return trainer, engine


def _device(name: str) -> torch.device:
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    return torch.device(name)


def parse(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="backends.workers.main", description=__doc__)
    parser.add_argument("--model", required=True)
    parser.add_argument("--fd", type=int, required=True, help="our end of a Unix socket pair")
    parser.add_argument("--dtype", choices=sorted(DTYPES), default="float32")
    parser.add_argument("--device", type=_device, default="auto")
    parser.add_argument("--device-run-bytes", type=int)
    parser.add_argument("--threads", type=int, required=True)
    parser.add_argument("--max-tokens-per-microbatch", type=int, required=True)
    parser.add_argument(
        "--activation-checkpointing", choices=get_args(Checkpointing), required=True
    )
    parser.add_argument("--max-batch-size", type=int, required=True)
    parser.add_argument("--kv-token-budget", type=int, required=True)
    return parser.parse_args(argv)


def main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    arguments = parse(sys.argv[1:])
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_OneLine("%(asctime)s worker %(levelname)s %(message)s"))
    logging.basicConfig(level=logging.INFO, handlers=[handler])
    connection = Connection(arguments.fd)
    torch.set_num_threads(arguments.threads)
    trainer, engine = load(arguments)
    connection.send(READY_CALL, Ready())
    Compute(trainer, engine, connection.send).run(connection.inbox)
    _log.info("stopped")


if __name__ == "__main__":
    main()
