"""What the owner of the server's data folder sees of the server that runs on it."""

from __future__ import annotations

import os
import subprocess
import sys

import tinker

from tests.e2e.client import new_run, train
from tests.running_server import RunningServer

RANK = 8
LAYER = 64 + 64 + 2 * (64 + 32) + 64 + 64 + 3 * (64 + 128)
"""in + out of q, k and v, o, and of gate, up and down."""
NUM_WEIGHTS = RANK * (2 * LAYER + 64 + 256)


def doctor(server: RunningServer) -> str:
    command = [sys.executable, "-m", "server.cli", "doctor", "--data", str(server.data)]
    environment = {**os.environ, "COLUMNS": "200"}
    return subprocess.run(
        command, capture_output=True, text=True, check=True, env=environment
    ).stdout


def mebibytes(floats: int) -> str:
    return f"{4 * floats / 2**20:.2f} MiB"


def test_the_doctor_prints_what_each_run_takes(own_server: RunningServer):
    service = tinker.ServiceClient(base_url=own_server.url, api_key="tml-anyone")
    fresh, trained = new_run(service, rank=RANK), new_run(service, rank=RANK)
    train(trained, steps=1)
    rows = {line.split()[1]: line for line in doctor(own_server).splitlines() if ":" in line}
    of_fresh, of_trained = (rows[run.get_info().model_id] for run in (fresh, trained))
    assert mebibytes(0) in of_fresh
    assert mebibytes(2 * NUM_WEIGHTS) in of_trained
    assert mebibytes(3 * NUM_WEIGHTS) in of_trained


def test_a_killed_server_leaves_the_doctor_without_its_runs(own_server: RunningServer):
    own_server.kill()
    assert "Memory" not in doctor(own_server)
