"""Ratios of passes on the machine at hand: `python -m tests.benchmarks.bench_pass`.

A model of SmolLM2-135M's shape with random weights. Every figure is a ratio of medians of runs
taken in turn, in processor time, so that neighbours on the machine disturb both sides alike.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from backends.contract import AdapterSpec, Datum, ForwardBackward, OptimStep
from backends.lora.head import chunk_rows, target_logprobs
from backends.model import FrozenModel
from backends.training.local import LocalTrainer

VOCAB_SIZE, HIDDEN_SIZE, TOKENS = 49152, 576, 4096
MIXED = (4, 8, 16, 16, 32, 32, 64, 64)
EQUAL = (sum(MIXED) // len(MIXED),) * len(MIXED)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--layers", type=int, default=30)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--peak-only", action="store_true", help="used by the script itself")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    if args.peak_only:
        print(_peak_of_logits())
        return
    print(json.dumps(_measure(args.layers, args.rounds), indent=2))


def _measure(layers: int, rounds: int) -> dict[str, float]:
    with tempfile.TemporaryDirectory() as folder:
        trainer = LocalTrainer(_model(Path(folder), layers), 8192)
    for i, rank in enumerate((32,) * 8):
        trainer.create(f"same{i}", _spec(rank))
    for i, (mixed, equal) in enumerate(zip(MIXED, EQUAL, strict=True)):
        trainer.create(f"mixed{i}", _spec(mixed))
        trainer.create(f"equal{i}", _spec(equal))
    eight = [_request(f"same{i}", [64]) for i in range(8)]
    one = [_request("same0", [64] * 8)]
    mixed, equal = ([_request(f"{k}{i}", [64]) for i in range(8)] for k in ("mixed", "equal"))
    prompts, whole = ([_request("same0", [512], prompt)] for prompt in (448, 0))
    attn = AdapterSpec(
        rank=32, alpha=32.0, seed=0, train_attn=True, train_mlp=True, train_unembed=False
    )
    for i in range(8):
        trainer.create(f"nohead{i}", attn)
    eight_nohead = [_request(f"nohead{i}", [64]) for i in range(8)]
    one_nohead = [_request("nohead0", [64] * 8)]
    return {
        "8 adapters x 64 tokens / 1 adapter x 512 (all targets)": _ratio(
            trainer, eight, one, rounds
        ),
        "the same without the head": _ratio(trainer, eight_nohead, one_nohead, rounds),
        "ranks 4..64 mixed / equal": _ratio(trainer, mixed, equal, rounds),
        "7/8 of the tokens have weight 0 / none": _ratio(trainer, prompts, whole, rounds),
        "peak of logits / [4096, 49152] float32": _peak_in_fresh_process(),
        "chunk rows": float(chunk_rows(VOCAB_SIZE)),
    }


def _spec(rank: int) -> AdapterSpec:
    return AdapterSpec(
        rank=rank, alpha=32.0, seed=0, train_attn=True, train_mlp=True, train_unembed=True
    )


def _model(folder: Path, layers: int) -> FrozenModel:
    config = LlamaConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=HIDDEN_SIZE,
        intermediate_size=1536,
        num_hidden_layers=layers,
        num_attention_heads=9,
        num_key_value_heads=3,
        max_position_embeddings=8192,
        tie_word_embeddings=True,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    return FrozenModel.load(folder, torch.float32, torch.device("cpu"))


def _request(run: str, lengths: Sequence[int], prompt: int = 0) -> ForwardBackward:
    rng = np.random.default_rng(0)
    data = []
    for length in lengths:
        weights = np.ones(length, np.float32)
        weights[:prompt] = 0
        targets = rng.integers(0, VOCAB_SIZE, length)
        inputs = {"target_tokens": targets, "weights": weights}
        data.append(Datum(tokens=rng.integers(0, VOCAB_SIZE, length), loss_inputs=inputs))
    return ForwardBackward(run=run, data=tuple(data), loss="cross_entropy")


def _ratio(
    trainer: LocalTrainer,
    first: Sequence[ForwardBackward],
    second: Sequence[ForwardBackward],
    rounds: int,
) -> float:
    times: tuple[list[float], list[float]] = ([], [])
    for _ in range(rounds + 1):
        for requests, taken in zip((first, second), times, strict=True):
            taken.append(_seconds(lambda r=requests: list(trainer.forward_backward(r))))
            # Untimed, so that each pass starts without a gradient, as one between steps does.
            trainer.optim_step([OptimStep(run=r.run, learning_rate=0.0) for r in requests])
    a, b = (statistics.median(taken[1:]) for taken in times)  # the first round warms up
    return round(a / b, 3)


def _seconds(call: Callable[[], object]) -> float:
    start = time.process_time()
    call()
    return time.process_time() - start


def _peak_in_fresh_process() -> float:
    """A process's peak only ever grows, so it takes a new one to measure."""
    command = [sys.executable, "-m", "tests.benchmarks.bench_pass", "--peak-only"]
    return round(float(subprocess.check_output(command)), 3)


def _peak_of_logits() -> float:
    """Forward and backward of the head over 4,096 tokens, over a whole [T, V] in float32."""

    def run(tokens: int) -> None:
        hidden = torch.randn(tokens, HIDDEN_SIZE, requires_grad=True)
        targets = torch.randint(VOCAB_SIZE, (tokens, 1))
        target_logprobs(hidden, weight, targets, []).sum().backward()

    def peak() -> int:
        # Not ru_maxrss: that starts at the peak of the process that forked this one.
        status = Path("/proc/self/status").read_text()
        return 1024 * int(status.split("VmHWM:")[1].split()[0])

    weight = torch.randn(VOCAB_SIZE, HIDDEN_SIZE)
    run(8)
    before = peak()
    run(TOKENS)
    return (peak() - before) / (4 * TOKENS * VOCAB_SIZE)


if __name__ == "__main__":
    main()
