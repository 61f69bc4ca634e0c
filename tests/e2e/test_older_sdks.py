"""SDKs that users still have, each in a venv of its own: the oldest in every run of the suite,
all of them with `make test-sdks`."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from tests.e2e.client import MODEL
from tests.running_server import RunningServer

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "tests" / "older_sdks" / "exercise.py"
VERSIONS = os.environ.get("HEARTH_TEST_SDKS", "0.16.1").split()


@pytest.mark.parametrize("version", VERSIONS)
def test_an_older_sdk_trains_samples_saves_and_resumes(version: str, server: RunningServer) -> None:
    python = ROOT / f".venv-sdk-{version}" / "bin" / "python"
    assert python.exists(), f"{python} is missing: make test-sdks makes it"
    run = subprocess.run(
        [str(python), str(SCRIPT), server.url, MODEL, server.keys["alice"]],
        capture_output=True,
        text=True,
        timeout=240,
        env={**os.environ, "NO_PROXY": "127.0.0.1"},
    )
    assert run.returncode == 0, run.stderr[-3000:]
