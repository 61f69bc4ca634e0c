from __future__ import annotations

import subprocess
import sys

import pytest
import torch
from torch import Tensor

from backends.lora.adapter import UNEMBED, Adapter, LoRAPair
from backends.lora.head import logits_rows, target_logprobs
from backends.lora.linear import Segment
from tests.unit.backends.material import spec

TOKENS, HIDDEN, VOCAB = 23, 12, 50


def _adapter(rank: int, seed: int) -> Adapter:
    generator = torch.Generator().manual_seed(seed)
    a, b = (torch.randn(*s, generator=generator) for s in ((rank, HIDDEN), (VOCAB, rank)))
    pair = LoRAPair(a.requires_grad_(), b.requires_grad_())
    return Adapter(spec(rank=rank, groups="unembed"), {UNEMBED: pair})


@pytest.fixture
def problem() -> tuple[Tensor, Tensor, Tensor, Tensor, list[Segment]]:
    torch.manual_seed(0)
    hidden = torch.randn(TOKENS, HIDDEN).requires_grad_()
    weight = torch.randn(VOCAB, HIDDEN)
    targets = torch.randint(VOCAB, (TOKENS, 3))
    targets[:, 2] = targets[:, 1]  # the same target twice must count twice
    upstream = torch.randn(TOKENS, 3)
    upstream[4:9] = 0
    plain = Adapter(spec(groups="attn"), {})
    segments = [
        Segment(2, 7, _adapter(2, 1)),
        Segment(7, 11, plain),
        Segment(11, 12, None),
        Segment(12, 21, _adapter(5, 2)),
    ]
    return hidden, weight, targets, upstream, segments


def _expected_logits(hidden: Tensor, weight: Tensor, segments: list[Segment]) -> Tensor:
    """float64, whole, from matrices that keep their own place in the graph."""
    rows = [hidden.double() @ weight.double().t()]
    for s in segments:
        if s.adapter is not None and UNEMBED in s.adapter.pairs:
            a, b = (m.double() for m in s.adapter.pairs[UNEMBED])
            scale = s.adapter.spec.alpha / s.adapter.spec.rank
            delta = (hidden[s.start : s.end].double() @ a.t()) @ b.t() * scale
            rows.append(torch.nn.functional.pad(delta, (0, 0, s.start, TOKENS - s.end)))
    return torch.stack(rows).sum(0)


@pytest.mark.parametrize("chunk", [1, 4, 23, 100])
def test_logprobs_and_all_gradients_are_those_of_whole_float64_logits(problem, chunk):
    hidden, weight, targets, upstream, segments = problem
    leaves = [hidden, *segments[0].adapter.pairs[UNEMBED], *segments[3].adapter.pairs[UNEMBED]]
    expected = _expected_logits(hidden, weight, segments).log_softmax(-1).gather(1, targets)
    got = target_logprobs(hidden, weight, targets, segments, chunk)
    assert got.dtype == torch.float32
    torch.testing.assert_close(got.double(), expected, rtol=1e-5, atol=1e-4)
    grads = torch.autograd.grad((got * upstream).sum(), leaves)
    expected_grads = torch.autograd.grad((expected * upstream).sum(), leaves)
    for grad, wanted in zip(grads, expected_grads, strict=True):
        torch.testing.assert_close(grad, wanted, rtol=1e-4, atol=1e-3)


def test_no_gradient_at_all_gives_zeros(problem):
    hidden, weight, targets, _, segments = problem
    got = target_logprobs(hidden, weight, targets, segments)
    (grad,) = torch.autograd.grad((got * 0).sum(), [hidden])
    assert not grad.any()


def test_logits_of_a_few_rows_carry_each_segments_own_head(problem):
    hidden, weight, _, _, segments = problem
    got = logits_rows(hidden, weight, segments)
    assert got.dtype == torch.float32
    assert not got.requires_grad
    expected = _expected_logits(hidden, weight, segments)
    torch.testing.assert_close(got.double(), expected, rtol=1e-5, atol=1e-4)


def test_logsumexp_is_float32_under_a_bfloat16_model(problem):
    hidden, weight, targets, _, _ = problem
    got = target_logprobs(hidden.bfloat16(), weight.bfloat16(), targets, [])
    logits = (hidden.bfloat16() @ weight.bfloat16().t()).double()
    expected = logits.log_softmax(-1).gather(1, targets)
    torch.testing.assert_close(got.double(), expected, rtol=1e-6, atol=1e-6)


PEAK = """
import re, torch
from backends.lora.head import target_logprobs
torch.set_num_threads(1)
def peak(): return 1024 * int(re.search(r"VmHWM:\\s+(\\d+)", open("/proc/self/status").read())[1])
def run(tokens):
    hidden = torch.randn(tokens, 16, requires_grad=True)
    weight = torch.randn(49152, 16)
    out = target_logprobs(hidden, weight, torch.randint(49152, (tokens, 1)), [])
    out.sum().backward()
run(8)
before = peak()
run(4096)
print((peak() - before) / (4 * 4096 * 49152))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="the peak is read from /proc")
def test_peak_memory_is_under_15_percent_of_whole_logits():
    done = subprocess.run([sys.executable, "-c", PEAK], capture_output=True, text=True, check=True)
    assert 0.005 < float(done.stdout) < 0.15
