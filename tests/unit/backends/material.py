"""Random data and adapters for tests, and short ways to drive a trainer."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import load_file
from torch import Tensor

from backends.contract import AdapterSpec, Datum, ForwardBackward, LossResult, PassOutcome
from backends.lora.adapter import Adapter, LoRAPair, fresh_adapter
from backends.lora.peft_folder import save_adapter
from backends.model import FrozenModel
from backends.training.trainer import Trainer
from tests.tiny_models import VOCAB_SIZE


def spec(rank: int = 4, seed: int = 0, groups: str = "attn mlp unembed") -> AdapterSpec:
    wanted = groups.split()
    return AdapterSpec(
        rank=rank,
        alpha=32.0,
        seed=seed,
        train_attn="attn" in wanted,
        train_mlp="mlp" in wanted,
        train_unembed="unembed" in wanted,
    )


def trained_adapter(model: FrozenModel, adapter_spec: AdapterSpec) -> Adapter:
    """As if trained for a while: B is not zero any more."""
    generator = torch.Generator().manual_seed(adapter_spec.seed + 1000)
    adapter = fresh_adapter(adapter_spec, model.targets, model.device)
    pairs = {
        name: LoRAPair(pair.a, torch.randn(pair.b.shape, generator=generator) * 0.02)
        for name, pair in adapter.pairs.items()
    }
    return Adapter.of(adapter_spec, pairs)


def start_trained(
    trainer: Trainer, model: FrozenModel, run: str, adapter_spec: AdapterSpec, folder: Path
) -> Path:
    """Give a run a trained adapter by loading it; gives back the folder it came from."""
    save_adapter(trained_adapter(model, adapter_spec), folder, model.name)
    trainer.load(run, folder, "adapter")
    return folder


def sft_datum(length: int, seed: int, prompt: int = 0) -> Datum:
    """Random tokens; the first `prompt` positions have weight 0."""
    rng = np.random.default_rng(seed)
    weights = rng.uniform(0.5, 1.5, length).astype(np.float32)
    weights[:prompt] = 0
    return Datum(
        tokens=rng.integers(0, VOCAB_SIZE, length),
        loss_inputs={
            "target_tokens": rng.integers(0, VOCAB_SIZE, length),
            "weights": weights,
        },
    )


def sft(run: str, lengths: Sequence[int], seed: int = 0, backward: bool = True) -> ForwardBackward:
    data = tuple(sft_datum(n, seed + i, prompt=n // 3) for i, n in enumerate(lengths))
    return ForwardBackward(run=run, data=data, loss="cross_entropy", backward=backward)


def run_all(trainer: Trainer, requests: Sequence[ForwardBackward]) -> list[PassOutcome]:
    generator = trainer.forward_backward(requests)
    while True:
        try:
            next(generator)
        except StopIteration as stop:
            return stop.value


def run_good(trainer: Trainer, *requests: ForwardBackward) -> list[LossResult]:
    results = run_all(trainer, requests)
    for result in results:
        assert isinstance(result, LossResult), result
    return [result for result in results if isinstance(result, LossResult)]


def gradient(trainer: Trainer, run: str, folder: Path) -> dict[str, Tensor]:
    """What waits for the run's next step."""
    trainer.save(run, folder, "snapshot")
    return load_file(folder / "gradients.safetensors")


def weights(trainer: Trainer, run: str, folder: Path) -> dict[str, Tensor]:
    trainer.save(run, folder, "adapter")
    tensors = load_file(folder / "adapter_model.safetensors")
    return {name.removeprefix("base_model.model."): t for name, t in tensors.items()}


def assert_close(
    got: dict[str, Tensor], expected: dict[str, Tensor], relative: float = 1e-5
) -> None:
    """Each tensor within `relative` of the other's norm."""
    assert got.keys() == expected.keys()
    for name, tensor in expected.items():
        difference = (got[name].double() - tensor.double()).norm()
        assert difference <= relative * tensor.double().norm() + 1e-12, name
