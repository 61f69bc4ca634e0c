"""The real SDK against a real server process on a tiny model."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

os.environ["NO_PROXY"] = "127.0.0.1"
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TINKER_TELEMETRY"] = "0"

import tinker

from tests.running_server import RunningServer
from tests.tiny_models import tiny_llama, with_tokenizer

MODEL = "tiny/llama"
KEY = "tml-test"


@pytest.fixture(scope="session")
def model_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return with_tokenizer(tiny_llama(tmp_path_factory.mktemp("model") / "llama"))


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory, model_path: Path) -> Iterator[RunningServer]:
    """One server for all tests that leave it as it was."""
    running = RunningServer(tmp_path_factory.mktemp("server") / "data", {MODEL: model_path})
    running.start()
    yield running
    running.interrupt()


@pytest.fixture
def own_server(tmp_path: Path, model_path: Path) -> Iterator[RunningServer]:
    """A server to kill and restart."""
    running = RunningServer(tmp_path / "data", {MODEL: model_path})
    running.start()
    yield running
    running.interrupt()


@pytest.fixture
def service(server: RunningServer) -> tinker.ServiceClient:
    return tinker.ServiceClient(base_url=server.url, api_key=KEY)
