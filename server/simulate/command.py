"""What `hearth simulate` does with its options."""

from __future__ import annotations

import importlib.util
from dataclasses import replace
from pathlib import Path

from rich.console import Console

from server.simulate.machines import MACHINES
from server.simulate.report import print_report
from server.simulate.study import study
from server.simulate.workloads import DEFAULT_MIX, crowd, mix_of, number


def simulate(
    *,
    tenants: int,
    machine: str,
    minutes: float,
    seed: int,
    mix: str | None,
    weights: str,
    token_budget: int | None,
    plot: Path | None,
) -> None:
    """Run, print, and draw if asked. Raises ValueError for what cannot be simulated."""
    if machine not in MACHINES:
        raise ValueError(f"--machine {machine!r} is none of {', '.join(MACHINES)}")
    if plot is not None:
        _check_plot(plot)
    chosen = MACHINES[machine]
    if token_budget is not None:
        chosen = replace(chosen, token_budget=token_budget)
    shares = DEFAULT_MIX if mix is None else mix_of(mix)
    result = study(crowd(tenants, seed, shares, _weights(weights)), chosen, 60 * minutes)
    print_report(result, Console())
    if plot is not None:
        from server.simulate.plot import draw  # matplotlib is optional

        draw(result, plot)


def _check_plot(path: Path) -> None:
    """Before minutes are spent on what could not be drawn."""
    if importlib.util.find_spec("matplotlib") is None:
        raise ValueError("--plot needs matplotlib, which is not installed: pip install matplotlib")
    if not path.absolute().parent.is_dir():
        raise ValueError(f"--plot {path}: there is no folder {path.absolute().parent}")


def _weights(text: str) -> list[float]:
    weights = [number(part) for part in text.split(",")]
    if not all(weights):
        raise ValueError(f"--weights {text!r}: each is above 0")
    return weights
