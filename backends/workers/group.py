"""A worker that only trains, on many ranks: the process that the service speaks to, as to
`main.py`. It starts the ranks, and when they cannot go on together it ends them and itself.
"""

from __future__ import annotations

import argparse
import logging
import sys
from queue import SimpleQueue

from backends.workers.coordinator import Coordinator, GroupLostError
from backends.workers.process import DTYPES, Connection, begin
from backends.workers.rank import TrainerSpec
from backends.workers.rank_events import Called, Events, RankHost
from backends.workers.rank_processes import RankProcesses

_log = logging.getLogger(__name__)


_LAYOUT = (
    "tensor_parallel",
    "pipeline_parallel",
    "expert_parallel",
    "sequence_parallel",
    "moe_router_dtype",
)
"""What only some trainers are told."""


def parse(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="backends.workers.group", description=__doc__)
    parser.add_argument("--trainer", required=True, help="module, see rank.TrainerSpec")
    parser.add_argument("--world-size", type=int, required=True, help="ranks")
    parser.add_argument("--ray", help="where Ray hosts them: auto, local or HOST:PORT")
    parser.add_argument("--model", required=True)
    parser.add_argument("--fd", type=int, required=True, help="our end of a Unix socket pair")
    parser.add_argument("--dtype", choices=sorted(DTYPES), default="float32")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--device-run-bytes", type=int)
    parser.add_argument("--threads", type=int, required=True, help="of all ranks together")
    parser.add_argument("--max-tokens-per-microbatch", type=int, required=True)
    parser.add_argument("--activation-checkpointing", required=True)
    for name in ("tensor", "pipeline", "expert"):
        parser.add_argument(f"--{name}-parallel", type=int)
    parser.add_argument("--sequence-parallel", action="store_true", default=None)
    parser.add_argument("--moe-router-dtype", help="float32, or model")
    return parser.parse_args(argv)


def spec(arguments: argparse.Namespace) -> TrainerSpec:
    given = {name: value for name, value in vars(arguments).items() if value is not None}
    layout = {name: given[name] for name in _LAYOUT if name in given}
    return TrainerSpec(
        trainer=arguments.trainer,
        model=arguments.model,
        dtype=arguments.dtype,
        device=arguments.device,
        world_size=arguments.world_size,
        threads=max(1, arguments.threads // arguments.world_size),
        max_tokens_per_microbatch=arguments.max_tokens_per_microbatch,
        activation_checkpointing=arguments.activation_checkpointing,
        device_run_bytes=arguments.device_run_bytes,
        layout=layout,
    )


def _host(arguments: argparse.Namespace, events: Events) -> RankHost:
    if arguments.ray is None:
        return RankProcesses(spec(arguments), events)
    from backends.workers.ray_ranks import RayRanks  # not everyone has Ray

    return RayRanks(spec(arguments), events, arguments.ray)


def _serve(arguments: argparse.Namespace) -> None:
    """Until told to stop. Raises GroupLostError when all ranks are gone."""
    events: Events = SimpleQueue()
    connection = Connection(arguments.fd, lambda called: events.put(Called(*called)))
    ranks = _host(arguments, events)
    try:
        Coordinator(ranks, arguments.world_size, connection.send).run(events)
    finally:
        ranks.end()


def main() -> int:
    arguments = parse(sys.argv[1:])
    begin("group")
    try:
        _serve(arguments)
    except GroupLostError as error:
        _log.error("%s", error)
        return 1
    _log.info("stopped")
    return 0


if __name__ == "__main__":
    sys.exit(main())
