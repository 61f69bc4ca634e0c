"""Settings come from flags, then the environment, then the file; a typo is an error."""

from __future__ import annotations

from pathlib import Path

import pytest
from pydantic import ValidationError
from rich.console import Console

from server import doctor
from server.settings import Settings


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """No file of this repository plays a part."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_a_flag_wins_over_the_environment_and_that_over_the_file(
    elsewhere: Path, monkeypatch: pytest.MonkeyPatch
):
    (elsewhere / "hearth.toml").write_text('port = 1\nhost = "file"\nthreads = 1\n')
    monkeypatch.setenv("HEARTH_PORT", "2")
    monkeypatch.setenv("HEARTH_HOST", "environment")
    settings = Settings(port=3)
    assert (settings.port, settings.host, settings.threads) == (3, "environment", 1)


def test_the_doctor_says_where_each_came_from(elsewhere: Path, monkeypatch: pytest.MonkeyPatch):
    (elsewhere / "hearth.toml").write_text('host = "file"\n')
    monkeypatch.setenv("HEARTH_THREADS", "2")
    found = doctor.sources(Settings(port=3), {"port": 3})
    assert found["port"] == "command line"
    assert found["threads"] == "HEARTH_THREADS"
    assert found["host"] == "hearth.toml"
    assert found["dtype"] == "default"


def test_a_typo_in_the_file_is_an_error(elsewhere: Path):
    (elsewhere / "hearth.toml").write_text("prot = 1\n")
    with pytest.raises(ValidationError, match="prot"):
        Settings()


def test_models_can_be_named_in_the_file(elsewhere: Path):
    (elsewhere / "hearth.toml").write_text('[models]\n"org/name" = "/models/name"\n')
    assert Settings().models == {"org/name": Path("/models/name")}


def test_tenants_are_weighted_in_the_file(elsewhere: Path):
    (elsewhere / "hearth.toml").write_text("[tenant_weights]\nlab = 3\n")
    assert Settings().tenant_weights == {"lab": 3.0}


@pytest.mark.parametrize(
    "wrong",
    [
        {"port": 70000},
        {"dtype": "float16"},
        {"long_poll_s": 60},
        {"gap_wait_s": -1},
        {"max_body_bytes": 1},
        {"lora_alpha": 0},
        {"tenant_weights": {"me": 0}},
    ],
)
def test_a_value_that_cannot_work_is_an_error(wrong: dict):
    with pytest.raises(ValidationError):
        Settings(**wrong)


def test_the_doctors_report_holds_no_password(capsys: pytest.CaptureFixture[str]):
    settings = Settings(database_url="postgresql+psycopg://me:secret@host/hearth")
    doctor.print_report(settings, {})
    report = capsys.readouterr().out
    assert "secret" not in report
    assert "hearth" in report


def test_the_doctor_prints_all_its_parts(monkeypatch: pytest.MonkeyPatch):
    console = Console(record=True, width=200)
    monkeypatch.setattr(doctor, "Console", lambda **_: console)
    doctor.print_report(Settings(), {})
    report = console.export_text()
    for part in ("Versions", "Machine", "Settings", "Features", "tick_token_budget", "disk, free"):
        assert part in report
