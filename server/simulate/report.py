"""What `hearth simulate` prints."""

from __future__ import annotations

from collections import Counter

import numpy as np
from rich.console import Console
from rich.table import Table

from server.simulate.study import Study
from server.simulate.workloads import WORKLOADS

COUNTED_SEQUENCES = 32
"""The fairness index is over the tenants that were due this many typical sequences."""


def print_report(study: Study, console: Console) -> None:
    console.print(_crowd(study))
    console.print(_policies(study))
    console.print(_steps(study))


def _crowd(study: Study) -> Table:
    machine = study.machine
    minutes = f"{study.seconds / 60:g} minutes"
    title = f"{len(study.tenants):,} tenants for {minutes} on {machine.description}"
    table = Table("tenants", "kind", "what they do", "median step alone", title=title)
    counts = Counter(tenant.kind for tenant in study.tenants)
    for kind in study.kinds:
        alone = study.alone[kind]
        seconds = _seconds(float(np.median(alone))) if len(alone) else "no step"
        table.add_row(f"{counts[kind]:,}", kind, WORKLOADS[kind].about, seconds)
    table.caption = (
        f"a tick has {machine.token_budget:,} tokens and takes up to "
        f"{_seconds(machine.pass_s + machine.token_budget * machine.token_s)}"
    )
    return table


def _policies(study: Study) -> Table:
    table = Table(
        "policy", "busy", "if ready", "tokens/s", "Jain", "over", "longest wait",
        "ticks", "CPU/tick",
        title="The machine",
    )  # fmt: skip
    least = COUNTED_SEQUENCES * study.machine.sequence_tokens
    for name, outcome in study.outcomes.items():
        measured = outcome.measured
        counted = int(measured.shares.counted(least).sum())
        table.add_row(
            name,
            f"{measured.busy_s / measured.seconds:.1%}",
            f"{measured.busy_s / measured.ready_s:.1%}" if measured.ready_s else "-",
            f"{measured.shares.got.sum() / measured.seconds:,.0f}",
            f"{measured.shares.index(least):.3f}" if counted > 1 else "-",
            f"{counted:,}",
            _seconds(measured.longest_wait_s),
            f"{measured.num_ticks:,}",
            f"{1e6 * measured.scheduler_s / max(measured.num_ticks, 1):,.0f} µs",
        )
    table.caption = (
        "Jain: fairness index of tokens got over tokens due, over the tenants that were due "
        f"{least:,} or more; wait: with work at the server, given nothing; CPU: of choosing"
    )
    return table


def _steps(study: Study) -> Table:
    table = Table(
        "kind", "policy", "steps", "p50", "p95", "p99", "x alone: p50", "p95",
        title="A step's latency, as its client sees it",
    )  # fmt: skip
    for kind in study.kinds:
        for name, outcome in study.outcomes.items():
            latencies, slowdowns = outcome.latencies[kind], outcome.slowdowns[kind]
            if len(latencies):
                shown = [_seconds(float(p)) for p in np.percentile(latencies, (50, 95, 99))]
                shown += [f"{p:,.1f}" for p in np.percentile(slowdowns, (50, 95))]
            else:
                shown = ["-"] * 5
            table.add_row(kind, name, f"{len(latencies):,}", *shown)
        table.add_section()
    return table


def _seconds(value: float) -> str:
    return f"{value:.2f} s" if value < 10 else f"{value:,.0f} s"
