"""The real SDK against a real server process on tiny models."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

os.environ["NO_PROXY"] = "127.0.0.1"
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TINKER_TELEMETRY"] = "0"

import tinker

from tests.e2e.client import MODEL, UNTIED, Raw
from tests.e2e.speech import with_words
from tests.running_server import RunningServer
from tests.sdk_leaks import pytest_configure, pytest_unconfigure
from tests.tiny_models import tiny_llama, tiny_qwen3, with_tokenizer

__all__ = ["pytest_configure", "pytest_unconfigure"]

MAX_BODY_BYTES = 16 * 2**20
SETTINGS = {
    # Small, so that a test of the limit need not send 256 MiB.
    "HEARTH_MAX_BODY_BYTES": str(MAX_BODY_BYTES),
    # Short, so that a test of a number that never comes need not wait long.
    "HEARTH_GAP_WAIT_S": "3",
}


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """`load_state` is deprecated in the SDK; the server must still answer it."""
    here = Path(__file__).parent
    for item in items:
        if here in item.path.parents:
            item.add_marker(pytest.mark.e2e)
            item.add_marker(pytest.mark.filterwarnings("ignore:DEPRECATED:FutureWarning"))


@pytest.fixture(scope="session")
def model_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tied Llama whose tokenizer has a few words of several characters."""
    return with_words(with_tokenizer(tiny_llama(tmp_path_factory.mktemp("model") / "llama")))


@pytest.fixture(scope="session")
def untied_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return with_tokenizer(tiny_qwen3(tmp_path_factory.mktemp("model") / "qwen3"))


@pytest.fixture(scope="session")
def server(
    tmp_path_factory: pytest.TempPathFactory, model_path: Path, untied_path: Path
) -> Iterator[RunningServer]:
    """One server with two tenants for all tests that leave it as it was."""
    models = {MODEL: model_path, UNTIED: untied_path}
    running = RunningServer(tmp_path_factory.mktemp("server") / "data", models, SETTINGS)
    running.create_key("alice")
    running.create_key("bob")
    running.start()
    yield running
    running.kill()  # what a stop would take long to save, nobody will ask for


@pytest.fixture
def own_server(tmp_path: Path, model_path: Path) -> Iterator[RunningServer]:
    """A server without keys, to kill and restart."""
    running = RunningServer(tmp_path / "data", {MODEL: model_path}, SETTINGS)
    running.start()
    yield running
    running.kill()


@pytest.fixture(scope="session")
def service(server: RunningServer) -> tinker.ServiceClient:
    """Alice's."""
    return tinker.ServiceClient(base_url=server.url, api_key=server.keys["alice"])


@pytest.fixture(scope="session")
def rest(server: RunningServer) -> tinker.RestClient:
    return tinker.RestClient(base_url=server.url, api_key=server.keys["alice"])


@pytest.fixture(scope="session")
def raw(server: RunningServer) -> Raw:
    """Alice without an SDK."""
    return Raw(server.url, server.keys["alice"])
