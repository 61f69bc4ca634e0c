"""Real vLLM servers on the CPU; skipped where `make install-vllm` was not run."""

from __future__ import annotations

import shutil
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
import pytest_asyncio
import tinker
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoTokenizer

from backends.model import FrozenModel
from backends.sampling.embedded import EmbeddedEngine
from backends.sampling.vllm.engine import VllmEngine
from tests.e2e.client import MODEL
from tests.e2e.conftest import SDK_LEAKS
from tests.running_server import RunningServer
from tests.vllm.material import (
    ADAPTERS,
    PYTHON,
    settings,
    started_engine,
    tiny_model,
    write_adapter,
)
from tests.vllm.served import KEY

torch.set_num_threads(1)

SETTINGS = {"HEARTH_ENGINE_PYTHON": str(PYTHON), "HEARTH_ENGINE_KV_CACHE_BYTES": "100000000"}


def pytest_configure(config: pytest.Config) -> None:
    for leak in SDK_LEAKS:
        config.addinivalue_line("filterwarnings", leak)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    here = Path(__file__).parent
    for item in items:
        if here in item.path.parents:
            item.add_marker(pytest.mark.vllm)
            item.add_marker(pytest.mark.timeout(900))
            missing = pytest.mark.skipif(not PYTHON.exists(), reason="make install-vllm")
            item.add_marker(missing)


@pytest.fixture(scope="session")
def base_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("base"))


@pytest.fixture(scope="session")
def model(base_path: Path) -> FrozenModel:
    return FrozenModel.load(base_path, torch.float32, torch.device("cpu"))


@pytest.fixture(scope="session")
def adapters(tmp_path_factory: pytest.TempPathFactory, model: FrozenModel) -> list[str]:
    """Folders of different ranks and layers, more of them than a replica holds."""
    folder = tmp_path_factory.mktemp("adapters")
    return [write_adapter(model, folder / f"{i}", shape) for i, shape in enumerate(ADAPTERS)]


@pytest.fixture(scope="session")
def too_large(tmp_path_factory: pytest.TempPathFactory, model: FrozenModel) -> str:
    """Of a rank that the replica was not started for."""
    return write_adapter(model, tmp_path_factory.mktemp("large") / "adapter", "33 attn")


@pytest.fixture(scope="session")
def diverged(tmp_path_factory: pytest.TempPathFactory, adapters: list[str]) -> str:
    folder = tmp_path_factory.mktemp("diverged") / "adapter"
    shutil.copytree(adapters[0], folder)
    file = folder / "adapter_model.safetensors"
    save_file({name: t.fill_(float("nan")) for name, t in load_file(file).items()}, file)
    return str(folder)


@pytest.fixture(scope="session")
def embedded(model: FrozenModel, base_path: Path) -> EmbeddedEngine:
    return EmbeddedEngine(model, AutoTokenizer.from_pretrained(base_path))


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def engine(
    base_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[VllmEngine]:
    """One replica that every test leaves as it was."""
    engine = await started_engine(settings(base_path), tmp_path_factory.mktemp("engine"))
    yield engine
    await engine.fleet.stop()


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory, base_path: Path) -> Iterator[RunningServer]:
    running = RunningServer(
        tmp_path_factory.mktemp("server") / "data",
        {MODEL: base_path},
        SETTINGS,
        options=("--engine", "vllm", "--replicas", "2"),
    )
    running.start()
    yield running
    running.kill()


@pytest.fixture(scope="session")
def service(server: RunningServer) -> Iterator[tinker.ServiceClient]:
    """Closed before the server is killed: a connection that was reset has no address any more by
    which the tests' settings tell the SDK's leaks from others."""
    with tinker.ServiceClient(base_url=server.url, api_key=KEY) as service:
        yield service
