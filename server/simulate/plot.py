"""The picture of a study: latencies of each kind of tenant, and who was served when."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import numpy as np
from matplotlib import rc_context
from matplotlib.figure import Figure, SubFigure
from matplotlib.ticker import (
    EngFormatter,
    LogLocator,
    NullLocator,
    PercentFormatter,
)

from server.simulate.study import Outcome, Study

POLICY_COLOURS = ("#c1440e", "#4c72b0", "#8a8a8a")
KIND_COLOURS = {
    "sft": "#c1440e",
    "rl": "#2a7f62",
    "burst": "#7b4fa3",
    "flood": "#222222",
    "tail": "#d9a441",
}
STYLE = {
    "font.size": 9,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.color": "#e6e6e6",
    "legend.frameon": False,
}


def draw(study: Study, path: Path) -> None:
    """Write a PNG."""
    with rc_context(STYLE):
        figure = Figure(figsize=(14, 8), layout="constrained")
        halves = figure.subfigures(2, 1, squeeze=False)
        _draw_latencies(study, halves[0, 0])
        _draw_service(study, halves[1, 0])
        figure.suptitle(
            f"{len(study.tenants):,} tenants for {study.seconds / 60:g} minutes on "
            f"{study.machine.description}",
            fontsize=12,
        )
        figure.savefig(path, format="png", dpi=110)


def _draw_latencies(study: Study, figure: SubFigure) -> None:
    panels = figure.subplots(1, len(study.kinds), sharey=True, squeeze=False)[0]
    for kind, axes in zip(study.kinds, panels, strict=True):
        for colour, (name, outcome) in zip(POLICY_COLOURS, study.outcomes.items(), strict=True):
            axes.plot(*_curve(outcome.latencies[kind]), label=name, color=colour, linewidth=1.8)
        alone = _curve(study.alone[kind])
        axes.plot(*alone, label="alone on the machine", color="#222222", linestyle=":")
        axes.set_xscale("log")
        low, high = axes.get_xlim()
        subs = (1.0, 2.0, 5.0) if high < 1000 * low else (1.0,)
        axes.xaxis.set_major_locator(LogLocator(base=10, subs=subs, numticks=10))
        axes.xaxis.set_major_formatter(_short)
        axes.xaxis.set_minor_locator(NullLocator())
        axes.set_xlabel("seconds")
        axes.set_title(kind)
    panels[0].yaxis.set_major_formatter(PercentFormatter(1.0))
    panels[0].set_ylabel("share of its steps that were done within")
    figure.legend(*panels[0].get_legend_handles_labels(), loc="outside lower center", ncols=4)


def _short(value: float, _: int | None) -> str:
    return f"{value:g}" if value < 1000 else f"{value / 1000:g}k"


def _curve(latencies: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Their cumulative distribution: seconds [P] and shares [P], in 400 points at most."""
    if not len(latencies):
        return latencies, latencies
    shares = np.linspace(0.0, 1.0, min(len(latencies), 400) + 1)
    return np.quantile(latencies, shares), shares


def _draw_service(study: Study, figure: SubFigure) -> None:
    panels = figure.subplots(1, len(study.outcomes), squeeze=False)[0]
    for (name, outcome), axes in zip(study.outcomes.items(), panels, strict=True):
        minutes, served = _service(study, outcome)
        for kind, tokens in served.items():
            axes.plot(minutes, tokens, label=kind, color=KIND_COLOURS[kind], linewidth=1.8)
        axes.set_xlabel("minutes")
        axes.set_title(name)
        axes.set_xlim(0, study.seconds / 60)
        axes.set_ylim(bottom=0)
        axes.yaxis.set_major_formatter(EngFormatter())
    panels[0].set_ylabel("tokens served so far, a tenant\nof weight 1 of that kind")
    figure.legend(*panels[0].get_legend_handles_labels(), loc="outside lower center", ncols=5)


def _service(study: Study, outcome: Outcome) -> tuple[np.ndarray, dict[str, np.ndarray]]:
    """Minutes [P], and by kind the tokens [P] its average tenant had by then, over its weight."""
    counts = Counter(tenant.kind for tenant in study.tenants)
    ticks = [tick for tick in outcome.measured.service if tick[0] <= study.seconds]
    gained = {kind: np.zeros(len(ticks)) for kind in study.kinds}
    for number, (_, tokens) in enumerate(ticks):
        for tenant, amount in tokens.items():
            kind, weight = study.tenants[tenant].kind, study.tenants[tenant].weight
            gained[kind][number] += amount / weight / counts[kind]
    minutes = np.array([ended for ended, _ in ticks]) / 60
    return minutes, {kind: np.cumsum(tokens) for kind, tokens in gained.items()}
