"""A worker process: one base model, its trainer and its sampling engine, behind one socket.

Started by `subprocess.py`; it ends when the other end of the socket is closed, however that came
about.
"""

from __future__ import annotations

import argparse
import logging
import sys
import time
from queue import SimpleQueue
from typing import cast, get_args

import torch
from transformers import AutoTokenizer
from transformers.utils import logging as transformers_logging

from backends.model import FrozenModel, UnsupportedModelError
from backends.sampling.embedded import EmbeddedEngine
from backends.sampling.stops import Decoder
from backends.training.activations import Checkpointing
from backends.training.local import local_trainer
from backends.training.trainer import Trainer
from backends.workers.compute import Compute, Inbox
from backends.workers.messages import READY_CALL, Broke, Ready
from backends.workers.process import DTYPES, Connection, begin, device_named

_log = logging.getLogger(__name__)


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


def parse(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="backends.workers.main", description=__doc__)
    parser.add_argument("--model", required=True)
    parser.add_argument("--fd", type=int, required=True, help="our end of a Unix socket pair")
    parser.add_argument("--dtype", choices=sorted(DTYPES), default="float32")
    parser.add_argument("--device", type=device_named, default="auto")
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
    arguments = parse(sys.argv[1:])
    begin("worker")
    inbox: Inbox = SimpleQueue()
    connection = Connection(arguments.fd, inbox.put)
    torch.set_num_threads(arguments.threads)
    try:
        trainer, engine = load(arguments)
    except UnsupportedModelError as error:
        connection.send(READY_CALL, Broke(str(error)))
        return
    connection.send(READY_CALL, Ready())
    Compute(trainer, engine, connection.send).run(inbox)
    _log.info("stopped")


if __name__ == "__main__":
    main()
