"""Ratios, the table and the JSON of the benchmarks, on made-up figures. Nothing here is timed."""

from __future__ import annotations

import json
from pathlib import Path

from tests.benchmarks.measure import Ratio, in_turn, percentile, ratio
from tests.benchmarks.report import Row, header, line, ratio_row, write_json

WITHIN = ratio_row("within", "a ratio", over=[2.0, 2.1, 2.2], under=[2.0, 2.0, 2.0], target=1.10)
MISSED = Row(name="missed", what="15 % at most", value=21.3, low=20, high=120, target=15, unit="%")
UNJUDGED = Row(
    name="time", what="a figure without a target", value=4.6, low=4.6, high=4.6, unit="s"
)


def test_a_ratio_is_of_medians_and_its_spread_of_single_rounds() -> None:
    assert ratio([2.0, 9.0, 4.0], [2.0, 3.0, 1.0]) == Ratio(4.0 / 2.0, 1.0, 4.0)


def test_sides_are_measured_in_turn_and_the_first_round_only_warms_up() -> None:
    order: list[str] = []

    def side(name: str) -> float:
        order.append(name)
        return float(len(order))

    taken = in_turn([lambda: side("a"), lambda: side("b")], rounds=2)
    assert order == ["a", "b"] * 3
    assert taken == [[3.0, 5.0], [4.0, 6.0]]


def test_a_percentile_is_a_figure_that_was_measured() -> None:
    figures = [float(value) for value in range(1, 21)]
    assert percentile(figures, 0.95) == 19.0
    assert percentile(figures, 0.5) == 10.0
    assert percentile([3.0], 0.95) == 3.0


def test_only_a_row_above_its_target_has_missed_it() -> None:
    assert [row.passed for row in (WITHIN, MISSED, UNJUDGED)] == [True, False, True]


def test_a_line_of_the_table_tells_value_target_spread_and_what_came_of_it() -> None:
    assert _words(line(WITHIN)) == "a ratio 1.05 x 1.10 x 1.00 .. 1.10 ok"
    assert _words(line(MISSED)) == "15 % at most 21.3 % 15.0 % 20.0 .. 120 MISSED"
    assert _words(line(UNJUDGED)) == "a figure without a target 4.60 s 4.60 .. 4.60"
    columns = header().splitlines()[0]
    assert columns.index("spread") == line(WITHIN).index("1.00")


def test_json_keeps_the_rows_beside_the_facts(tmp_path: Path) -> None:
    write_json(tmp_path / "out" / "bench.json", [WITHIN, MISSED], {"commit": "abc"})
    kept = json.loads((tmp_path / "out" / "bench.json").read_text())
    assert kept["commit"] == "abc"
    assert [(row["name"], row["passed"]) for row in kept["rows"]] == [
        ("within", True),
        ("missed", False),
    ]
    assert kept["rows"][0]["details"] == {"over_s": 2.1, "under_s": 2.0}


def _words(text: str) -> str:
    return " ".join(text.split())
