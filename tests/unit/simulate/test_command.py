"""`hearth simulate`, from its options to the tables and the picture."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner, Result

from server.cli import app
from server.simulate.machines import LAPTOP
from server.simulate.policies import POLICIES
from server.simulate.study import alone_latencies, study
from server.simulate.workloads import crowd


@pytest.fixture(autouse=True)
def wide(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "160")


def simulate(*options: str) -> Result:
    return CliRunner().invoke(app, ["simulate", "--machine", "laptop", "--minutes", "5", *options])


def test_it_prints_what_each_policy_did_and_draws_it(tmp_path: Path):
    picture = tmp_path / "out.png"
    result = simulate("--tenants", "6", "--weights", "1,2", "--plot", str(picture))

    assert result.exit_code == 0, result.output
    assert "6 tenants for 5 minutes on one CPU core" in result.output
    for policy in POLICIES:
        assert policy in result.output
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_the_same_seed_prints_the_same_latencies():
    first, again, other = (
        simulate("--tenants", "6", "--seed", seed).output.split("A step's latency")[1]
        for seed in ("1", "1", "2")
    )
    assert first == again != other


def test_a_kind_that_came_to_no_step_is_shown_all_the_same(tmp_path: Path):
    picture = tmp_path / "out.png"
    result = simulate(
        "--tenants", "1", "--mix", "tail=1", "--minutes", "0.01", "--plot", str(picture)
    )
    assert result.exit_code == 0, result.output
    assert "no step" in result.output


@pytest.mark.parametrize(
    ("options", "named"),
    [
        (["--machine", "abacus"], "laptop, h200, h200-node"),
        (["--mix", "who=1"], "who=1"),
        (["--weights", "1,0"], "--weights"),
        (["--weights", "x"], "'x'"),
        (["--tenants", "0"], "--tenants"),
        (["--plot", "nowhere/out.png"], "nowhere"),
    ],
)
def test_what_cannot_be_simulated_is_named(options, named):
    result = simulate(*options)
    assert result.exit_code == 2
    assert named in result.output


def test_without_matplotlib_a_plot_is_refused_before_anything_runs(monkeypatch, tmp_path: Path):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    result = simulate("--plot", str(tmp_path / "out.png"))
    assert result.exit_code == 2
    assert "pip install matplotlib" in result.output


def test_a_tenant_by_itself_is_as_fast_as_alone():
    shown = study(crowd(1, 0, {"sft": 1.0}), LAPTOP, 60.0)
    for outcome in shown.outcomes.values():
        assert len(outcome.slowdowns["sft"]) > 5
        # The others do not cut a step of 512 tokens and its neighbours into ticks.
        assert outcome.slowdowns["sft"] == pytest.approx(1.0, rel=0.05)
    assert shown.outcomes["Hearth"].slowdowns["sft"] == pytest.approx(1.0)
    assert np.array_equal(shown.alone["sft"], shown.outcomes["Hearth"].latencies["sft"])


def test_slowdowns_compare_each_step_with_itself_alone():
    tenants = crowd(5, 0)
    shown = study(tenants, LAPTOP, 300.0)
    [sft] = [one for one in tenants if one.kind == "sft"]
    latencies = shown.outcomes["Hearth"].latencies["sft"]
    alone = alone_latencies(sft, LAPTOP, len(latencies))
    assert shown.outcomes["Hearth"].slowdowns["sft"] == pytest.approx(latencies / np.array(alone))
