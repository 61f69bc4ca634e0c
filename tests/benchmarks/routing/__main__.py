"""Routing policies before simulated replicas: `python -m tests.benchmarks.routing --replicas 4`.

Nothing here is timed: the same arguments print the same numbers on every machine.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from functools import partial
from itertools import count

from rich.console import Console
from rich.table import Table

from backends.sampling.vllm.routing import OVERLOAD_SAMPLES, Choose
from tests.benchmarks.routing import policies
from tests.benchmarks.routing.engine import COSTS, Ask
from tests.benchmarks.routing.simulation import Report, simulate
from tests.benchmarks.routing.workloads import WORKLOADS

_COLUMNS = ("tokens/s", "p50 s", "p99 s", "prefix hits", "adapter loads", "max/mean load")


def main() -> None:
    args = _arguments()
    console = Console(width=110)
    for name in args.workloads:
        replicas = (
            f"{args.replicas} replicas ({args.costs}, crowd {args.crowd:g}, seed {args.seed})"
        )
        table = Table("policy", title=f"{name} on {replicas}", title_justify="left")
        for column in _COLUMNS:
            table.add_column(column, justify="right")
        for policy, choose, key in _compared(args.overload):
            report = simulate(
                WORKLOADS[name],
                choose,
                key,
                costs=COSTS[args.costs],
                replicas=args.replicas,
                seed=args.seed,
                seconds=args.seconds,
                crowd=args.crowd,
            )
            table.add_row(policy, *_cells(report))
        console.print(table)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--replicas", type=int, default=4)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--seconds", type=float, default=600.0, help="virtual ones")
    parser.add_argument("--crowd", type=float, default=1.0, help="times as many clients")
    parser.add_argument("--costs", choices=COSTS, default="gpu")
    parser.add_argument("--overload", type=int, nargs="+", default=[OVERLOAD_SAMPLES])
    parser.add_argument("--workloads", nargs="+", choices=WORKLOADS, default=list(WORKLOADS))
    return parser.parse_args()


def _compared(overloads: list[int]) -> Iterator[tuple[str, Choose, Callable[[Ask], str]]]:
    """By sampling session, by conversation, which is finer where a session has many of them, and
    with nothing to stick by."""
    keys: dict[str, Callable[[Ask], str]] = {
        "by session": lambda ask: ask.session,
        "by conversation": lambda ask: ask.conversation,
    }
    for samples in overloads:
        for by, key in keys.items():
            yield f"ours ({samples}) {by}", policies.ours(samples), key
        yield f"ours ({samples}) by nothing", policies.ours(samples), partial(_fresh, count())
    for by, key in keys.items():
        yield f"hashing {by}", policies.consistent_hashing(), key
    yield "round robin", policies.round_robin(), keys["by session"]
    yield "least loaded", policies.least_loaded(), keys["by session"]


def _fresh(numbers: Iterator[int], ask: Ask) -> str:
    return str(next(numbers))


def _cells(report: Report) -> tuple[str, ...]:
    return (
        f"{report.tokens_per_s:,.0f}",
        f"{report.p50_s:.2f}",
        f"{report.p99_s:.1f}",
        f"{report.prefix_hits:.0%}",
        f"{report.adapter_loads:,}",
        f"{report.imbalance:.2f}",
    )


if __name__ == "__main__":
    main()
