"""Peak memory of the logits, forwards and backwards, over a whole [T, V] array in float32."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import torch

from backends.lora.head import target_logprobs
from tests.benchmarks.report import Row
from tests.benchmarks.scale import Scale

TOKENS, VOCAB_SIZE, HIDDEN_SIZE = 4096, 49152, 576


def rows(scale: Scale) -> Iterator[Row]:
    shares = sorted(_share_in_fresh_process() for _ in range(3))
    yield Row(
        name="logits-peak",
        what="peak memory of logits, 4,096 tokens / a whole [T, V] in float32",
        value=100 * shares[1],
        low=100 * shares[0],
        high=100 * shares[2],
        target=15.0,
        unit="%",
    )


def _share_in_fresh_process() -> float:
    """A process's peak only ever grows, so it takes a new one to measure."""
    command = [sys.executable, "-m", "tests.benchmarks.logits_peak"]
    return float(subprocess.check_output(command))


def _share() -> float:
    def run(tokens: int) -> None:
        hidden = torch.randn(tokens, HIDDEN_SIZE, requires_grad=True)
        targets = torch.randint(VOCAB_SIZE, (tokens, 1))
        target_logprobs(hidden, weight, targets, []).sum().backward()

    weight = torch.randn(VOCAB_SIZE, HIDDEN_SIZE)
    run(8)
    before = _peak_bytes()
    run(TOKENS)
    return (_peak_bytes() - before) / (4 * TOKENS * VOCAB_SIZE)


def _peak_bytes() -> int:
    # Not ru_maxrss: that starts at the peak of the process that forked this one.
    status = Path("/proc/self/status").read_text()
    return 1024 * int(status.split("VmHWM:")[1].split()[0])


if __name__ == "__main__":
    torch.set_num_threads(1)
    print(_share())
