"""One tiny base model with two adapters of different rank, on disk."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from backends.contract import AdapterSpec
from backends.lora.adapter import fresh_adapter
from backends.lora.peft_folder import save_adapter
from backends.model import FrozenModel
from tests.tiny_models import tiny_llama, with_tokenizer
from tests.unit.sampling.material import MakeEngine

torch.set_num_threads(1)


@pytest.fixture(scope="session")
def base_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return with_tokenizer(tiny_llama(tmp_path_factory.mktemp("base")))


@pytest.fixture(scope="session")
def model(base_path: Path) -> FrozenModel:
    return FrozenModel.load(base_path, torch.float32, torch.device("cpu"))


@pytest.fixture(scope="session")
def tokenizer(base_path: Path) -> PreTrainedTokenizerBase:
    return AutoTokenizer.from_pretrained(base_path)


@pytest.fixture(scope="session")
def adapters(tmp_path_factory: pytest.TempPathFactory, model: FrozenModel) -> tuple[str, str]:
    """Folders: every group at rank 4, attention alone at rank 9; neither is a no-op."""
    folders = []
    for rank, everything in ((4, True), (9, False)):
        spec = AdapterSpec(
            rank=rank,
            alpha=2.0 * rank,
            seed=rank,
            train_attn=True,
            train_mlp=everything,
            train_unembed=everything,
        )
        adapter = fresh_adapter(spec, model.targets, model.device)
        generator = torch.Generator().manual_seed(rank)
        for pair in adapter.pairs.values():
            pair.b.normal_(std=0.05, generator=generator)
        folder = tmp_path_factory.mktemp("adapters") / f"rank{rank}"
        save_adapter(adapter, folder, "tiny")
        folders.append(str(folder))
    return folders[0], folders[1]


@pytest.fixture
def make_engine(model: FrozenModel, tokenizer: PreTrainedTokenizerBase) -> MakeEngine:
    return MakeEngine(model, tokenizer)
