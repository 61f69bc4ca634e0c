"""Tiny base models, built once a session."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from backends.model import FrozenModel
from backends.training.local import local_trainer
from backends.training.trainer import Trainer
from tests.tiny_models import tiny_llama, tiny_qwen3, with_tokenizer

torch.set_num_threads(1)


@pytest.fixture(scope="session")
def llama_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Tied embeddings."""
    return with_tokenizer(tiny_llama(tmp_path_factory.mktemp("llama")))


@pytest.fixture(scope="session")
def qwen3_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Untied embeddings."""
    return with_tokenizer(tiny_qwen3(tmp_path_factory.mktemp("qwen3")))


@pytest.fixture(scope="session", params=["llama", "qwen3"])
def model_path(request: pytest.FixtureRequest) -> Path:
    return request.getfixturevalue(f"{request.param}_path")


@pytest.fixture(scope="session")
def load_model() -> Callable[..., FrozenModel]:
    """Base models are frozen, so one of each is enough for all tests."""
    loaded: dict[tuple[Path, torch.dtype], FrozenModel] = {}

    def load(path: Path, dtype: torch.dtype = torch.float32) -> FrozenModel:
        if (path, dtype) not in loaded:
            loaded[path, dtype] = FrozenModel.load(path, dtype, torch.device("cpu"))
        return loaded[path, dtype]

    return load


@pytest.fixture
def new_trainer(load_model: Callable[..., FrozenModel]) -> Callable[..., Trainer]:
    def new(path: Path, max_tokens: int = 4096, dtype: torch.dtype = torch.float32) -> Trainer:
        return local_trainer(load_model(path, dtype), max_tokens)

    return new


@pytest.fixture
def trainer(llama_path: Path, new_trainer: Callable[..., Trainer]) -> Trainer:
    return new_trainer(llama_path)
