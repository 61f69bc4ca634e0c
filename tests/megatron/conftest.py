"""Megatron on the CPU, by gloo; in the environment that `make install-megatron` makes."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from backends.model import FrozenModel
from backends.training.local import local_trainer
from backends.training.trainer import Trainer
from tests.megatron.group import Group
from tests.megatron.material import MAX_TOKENS
from tests.tiny_models import tiny_llama, tiny_qwen3

torch.set_num_threads(1)

NUM_RANKS = 4


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    here = Path(__file__).parent
    missing = importlib.util.find_spec("megatron") is None
    for item in items:
        if here in item.path.parents:
            item.add_marker(pytest.mark.megatron)
            item.add_marker(pytest.mark.skipif(missing, reason="make install-megatron"))


@pytest.fixture(scope="session")
def group(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Group]:
    made = Group(NUM_RANKS, tmp_path_factory.mktemp("group"))
    yield made
    made.close()


@pytest.fixture(scope="session", params=["llama", "tied llama", "qwen3"])
def base(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("base")
    if request.param == "qwen3":
        return tiny_qwen3(path)
    return tiny_llama(path, tied=request.param == "tied llama")


@pytest.fixture
def local(base: Path) -> Trainer:
    """The trainer of one process, on the same base model."""
    model = FrozenModel.load(base, torch.float32, torch.device("cpu"))
    return local_trainer(model, MAX_TOKENS)
