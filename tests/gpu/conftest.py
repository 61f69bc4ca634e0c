"""Checks of a GPU, run by `make test-gpu`; `ARGS="--device cpu"` tries their logic without one, on
smaller models.

Their part on a GPU has not been run yet: they were written on a machine that has none.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from tests.gpu.models import BILLIONS, LARGER, SMALL, TINY, Shape

Report = Callable[[str], None]


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--device", default="cuda", help="cuda, or cpu to try the logic")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        # What a driver or a kernel warns of on somebody's machine is for them to read.
        item.add_marker(pytest.mark.filterwarnings("default"))
        item.add_marker(pytest.mark.timeout(900))


def pytest_report_header(config: pytest.Config) -> str:
    if config.getoption("--device") != "cpu" and torch.cuda.is_available():
        name, (_, total) = torch.cuda.get_device_name(), torch.cuda.mem_get_info()
        return f"on {name} with {total / 2**30:.1f} GiB, torch {torch.__version__}"
    return f"on the CPU, torch {torch.__version__}"


@pytest.fixture(scope="session")
def device(request: pytest.FixtureRequest) -> torch.device:
    wanted = torch.device(request.config.getoption("--device"))
    if wanted.type == "cuda" and not torch.cuda.is_available():
        pytest.skip(
            "torch sees no CUDA device here; run this where there is one, or try its logic with "
            'make test-gpu ARGS="--device cpu"'
        )
    return wanted


@pytest.fixture(scope="session")
def small(device: torch.device) -> Shape:
    """For comparisons with the CPU, which has to compute it too."""
    return SMALL if device.type == "cuda" else TINY


@pytest.fixture(scope="session")
def large(device: torch.device) -> Shape:
    """For times and memory."""
    return BILLIONS if device.type == "cuda" else LARGER


@pytest.fixture
def report(capsys: pytest.CaptureFixture[str]) -> Report:
    """Print a line that is seen whether the test passes or not."""

    def line(text: str) -> None:
        with capsys.disabled():
            print(f"\n  {text}", end="", flush=True)

    return line
