"""The same seeded tenants on every kind of trainer: what each says of their losses.

    python -m tests.benchmarks.same_losses [--model FOLDER] [--steps N]

Starts a real server for each trainer that is installed, has several tenants train at the same time
through the SDK, and prints their losses side by side, with the largest difference from the local
trainer.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import tinker
from tinker import types

from tests.running_server import RunningServer
from tests.tiny_models import tiny_qwen3, with_tokenizer

MODEL = "local/model"
RANKS = (2, 4, 8, 16)
"""Of the tenants' adapters."""
TP, PP = ("--tensor-parallel", "2"), ("--pipeline-parallel", "2")
TRAINERS: Mapping[str, Sequence[str]] = {
    "local": (),
    "fsdp, 2 ranks": ("--trainer", "fsdp", "--world-size", "2"),
    "fsdp, 2 ranks, Ray": ("--trainer", "fsdp", "--world-size", "2", "--ray", "local"),
    "megatron, TP 2": ("--trainer", "megatron", "--world-size", "2", *TP),
    "megatron, PP 2": ("--trainer", "megatron", "--world-size", "2", *PP),
    "megatron, TP 2, PP 2": ("--trainer", "megatron", "--world-size", "4", *TP, *PP),
}


def main() -> None:
    options = _parse()
    with tempfile.TemporaryDirectory() as folder:
        model = options.model or with_tokenizer(tiny_qwen3(Path(folder) / "model"))
        expected: np.ndarray | None = None
        for name in options.only or TRAINERS:
            with _serving(model, Path(folder) / name, TRAINERS[name]) as service:
                losses = _train(service, options.steps)
            expected = losses if expected is None else expected
            print(_line(name, losses, expected), flush=True)


def _line(name: str, losses: np.ndarray, expected: np.ndarray) -> str:
    """losses[steps, tenants]"""
    difference = np.abs(losses / expected - 1).max()
    shown = " ".join(f"{loss:.4f}" for loss in losses[-1])
    return f"| {name} | {shown} | {difference:.1e} |"


@contextmanager
def _serving(model: Path, data: Path, options: Sequence[str]) -> Iterator[tinker.ServiceClient]:
    server = RunningServer(data, {MODEL: model}, threads=2, options=options)
    server.start()
    try:
        service = tinker.ServiceClient(base_url=server.url, api_key="tml-anyone")
        yield service
        service.close("success")
    finally:
        server.interrupt()


def _train(service: tinker.ServiceClient, steps: int) -> np.ndarray:
    """[steps, tenants]: the sum of losses of each step, all tenants at the same time."""
    tenants = [
        service.create_lora_training_client(MODEL, rank=rank, seed=rank).result() for rank in RANKS
    ]
    data = [_data(rank) for rank in RANKS]
    losses = []
    for _ in range(steps):
        passes = [
            tenant.forward_backward(batch, "cross_entropy")
            for tenant, batch in zip(tenants, data, strict=True)
        ]
        stepped = [tenant.optim_step(types.AdamParams(learning_rate=1e-2)) for tenant in tenants]
        losses.append([one.result(timeout=300).metrics["loss:sum"] for one in passes])
        for one in stepped:
            one.result(timeout=300)
    return np.array(losses)


def _data(seed: int) -> list[types.Datum]:
    rng = np.random.default_rng(seed)
    return [_datum(rng.integers(0, 250, length + 1)) for length in (40, 7, 25, 64)]


def _datum(tokens: np.ndarray) -> types.Datum:
    targets = types.TensorData.from_numpy(tokens[1:].astype(np.int64))
    weights = types.TensorData.from_numpy(np.ones(len(tokens) - 1, np.float32))
    return types.Datum(
        model_input=types.ModelInput.from_ints(tokens[:-1].tolist()),
        loss_fn_inputs={"target_tokens": targets, "weights": weights},
    )


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", type=Path, help="a folder; by default a tiny random Qwen3")
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--only", action="append", choices=list(TRAINERS), help="may be repeated")
    return parser.parse_args()


if __name__ == "__main__":
    main()
