"""What a benchmark leaves behind: a table to read and JSON to keep."""

from __future__ import annotations

import json
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from tests.benchmarks.measure import ratio

_WIDTH = 66


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One figure. `low` and `high` are its spread over the rounds of the run."""

    name: str
    """Stable, for those who compare JSON of different days."""
    what: str
    value: float
    low: float
    high: float
    target: float | None = None
    """The value must not exceed it; None where the design sets no target."""
    unit: str = "x"
    details: dict[str, float] = field(default_factory=dict)
    """What the figure was made of, in the units that the names say."""

    @property
    def passed(self) -> bool:
        return self.target is None or self.value <= self.target


def ratio_row(
    name: str, what: str, over: Sequence[float], under: Sequence[float], target: float
) -> Row:
    """Of two sides that were measured in turn, in seconds."""
    found = ratio(over, under)
    return Row(
        name=name,
        what=what,
        value=found.value,
        low=found.low,
        high=found.high,
        target=target,
        details={"over_s": statistics.median(over), "under_s": statistics.median(under)},
    )


def header() -> str:
    return f"{'':{_WIDTH}} {'measured':>12} {'at most':>12}   spread\n{'-' * (_WIDTH + 50)}"


def line(row: Row) -> str:
    """One line of the table, marked with what came of the target."""
    target = "" if row.target is None else f"{_number(row.target)} {row.unit}"
    spread = f"{_number(row.low)} .. {_number(row.high)}"
    mark = "" if row.target is None else ("ok" if row.passed else "MISSED")
    value = f"{_number(row.value)} {row.unit}"
    return f"{row.what:{_WIDTH}} {value:>12} {target:>12}   {spread:<18} {mark}".rstrip()


def details(row: Row) -> str:
    return "    " + ", ".join(f"{name} {_number(value)}" for name, value in row.details.items())


def write_json(path: Path, rows: Sequence[Row], facts: dict[str, Any]) -> None:
    """Machine and versions beside the rows: a figure without them says little."""
    path.parent.mkdir(parents=True, exist_ok=True)
    listed = [{**asdict(row), "passed": row.passed} for row in rows]
    path.write_text(json.dumps({**facts, "rows": listed}, indent=2) + "\n")


def _number(value: float) -> str:
    """Three significant digits, or all those before the point."""
    return f"{value:.0f}" if abs(value) >= 99.95 else f"{value:#.3g}"
