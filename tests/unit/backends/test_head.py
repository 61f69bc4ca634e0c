from __future__ import annotations

import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier

import pytest
import torch
from torch import Tensor

from backends.lora.adapter import UNEMBED, Adapter, LoRAPair
from backends.lora.groups import EqualGroup, RaggedGroup
from backends.lora.head import logits_rows, target_logprobs
from backends.lora.linear import Segment
from backends.lora.parts import Owner, Part
from tests.unit.backends.material import spec

TOKENS, HIDDEN, VOCAB = 23, 12, 52
F32 = torch.float32


def _adapter(rank: int, seed: int, module: str = UNEMBED) -> Adapter:
    generator = torch.Generator().manual_seed(seed)
    a, b = (torch.randn(*s, generator=generator) for s in ((rank, HIDDEN), (VOCAB, rank)))
    return Adapter.of(spec(rank=rank, groups="unembed"), {module: LoRAPair(a, b)})


OWNERS = [
    Owner(2, 7, _adapter(2, 1), backward=True),
    Owner(7, 11, _adapter(2, 0, "another module"), backward=True),
    Owner(12, 15, _adapter(4, 2), backward=True),
    Owner(15, 18, _adapter(4, 3), backward=True),
    Owner(18, 21, _adapter(4, 4), backward=True),
]


def _parts(kind: str) -> list[Part]:
    alone = [Segment.of(owner, F32) for owner in OWNERS]
    base = Segment(11, 12, None)
    if kind == "alone":
        return [*alone[:2], base, *alone[2:]]
    group = EqualGroup if kind == "equal" else RaggedGroup
    return [*alone[:2], base, group.of(OWNERS[2:], F32)]


@pytest.fixture
def problem() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    torch.manual_seed(0)
    hidden = torch.randn(TOKENS, HIDDEN).requires_grad_()
    weight = torch.randn(VOCAB, HIDDEN)
    targets = torch.randint(VOCAB, (TOKENS, 3))
    targets[:, 2] = targets[:, 1]  # the same target twice must count twice
    upstream = torch.randn(TOKENS, 3)
    upstream[4:9] = 0
    upstream[16] = 0
    return hidden, weight, targets, upstream


def _expected_logits(hidden: Tensor, weight: Tensor, leaves: list[list[Tensor]]) -> Tensor:
    """float64, whole, from matrices that keep their own place in the graph."""
    rows = [hidden.double() @ weight.double().t()]
    for owner, pair in zip(OWNERS, leaves, strict=True):
        if UNEMBED in owner.adapter.pairs:
            a, b = (matrix.double() for matrix in pair)
            scale = owner.adapter.spec.alpha / owner.adapter.spec.rank
            delta = (hidden[owner.start : owner.end].double() @ a.t()) @ b.t() * scale
            rows.append(torch.nn.functional.pad(delta, (0, 0, owner.start, TOKENS - owner.end)))
    return torch.stack(rows).sum(0)


def _leaves() -> list[list[Tensor]]:
    return [
        [
            matrix.clone().requires_grad_()
            for pair in owner.adapter.pairs.values()
            for matrix in pair
        ]
        for owner in OWNERS
    ]


@pytest.mark.parametrize("kind", ["alone", "equal", "ragged"])
@pytest.mark.parametrize("chunk", [1, 4, 23, 100])
def test_logprobs_and_all_gradients_are_those_of_whole_float64_logits(problem, chunk, kind):
    hidden, weight, targets, upstream = problem
    leaves, parts = _leaves(), _parts(kind)
    expected = _expected_logits(hidden, weight, leaves).log_softmax(-1).gather(1, targets)
    got = target_logprobs(hidden, weight, targets, parts, chunk)
    assert got.dtype == torch.float32
    torch.testing.assert_close(got.double(), expected, rtol=1e-5, atol=1e-4)
    (grad,) = torch.autograd.grad((got * upstream).sum(), [hidden])
    changing = [i for i, owner in enumerate(OWNERS) if UNEMBED in owner.adapter.pairs]
    wanted = torch.autograd.grad(
        (expected * upstream).sum(), [hidden, *(leaf for i in changing for leaf in leaves[i])]
    )
    torch.testing.assert_close(grad, wanted[0], rtol=1e-4, atol=1e-3)
    flats = [flat for part in parts for flat in part.take_gradients() if flat is not None]
    pairs = [OWNERS[i].adapter.layout.pair(flats[i], UNEMBED) for i in changing]
    for matrix, expected_matrix in zip((m for p in pairs for m in p), wanted[1:], strict=True):
        torch.testing.assert_close(matrix, expected_matrix, rtol=1e-4, atol=1e-3)
    assert not flats[1].any()


def test_an_adapter_on_the_head_alone_gets_its_gradient_though_the_hidden_states_want_none(problem):
    hidden, weight, targets, upstream = problem
    parts = _parts("alone")
    (target_logprobs(hidden.detach(), weight, targets, parts) * upstream).sum().backward()
    expected = _parts("alone")
    (target_logprobs(hidden, weight, targets, expected) * upstream).sum().backward()
    for part, other in zip(parts, expected, strict=True):
        for got, wanted in zip(part.take_gradients(), other.take_gradients(), strict=True):
            assert (got is None) == (wanted is None)
            assert got is None or torch.equal(got, wanted)


def test_no_gradient_at_all_gives_zeros(problem):
    hidden, weight, targets, _ = problem
    parts = _parts("equal")
    got = target_logprobs(hidden, weight, targets, parts)
    (grad,) = torch.autograd.grad((got * 0).sum(), [hidden])
    assert not grad.any()
    flats = [flat for part in parts for flat in part.take_gradients() if flat is not None]
    assert len(flats) == len(OWNERS)
    assert not any(flat.any() for flat in flats)


@pytest.mark.parametrize("kind", ["alone", "equal", "ragged"])
def test_logits_of_a_few_rows_carry_each_segments_own_head(problem, kind):
    hidden, weight, *_ = problem
    got = logits_rows(hidden, weight, _parts(kind))
    assert got.dtype == torch.float32
    assert not got.requires_grad
    expected = _expected_logits(hidden, weight, _leaves())
    torch.testing.assert_close(got.double(), expected, rtol=1e-5, atol=1e-4)


def test_logsumexp_is_float32_under_a_bfloat16_model(problem):
    hidden, weight, targets, _ = problem
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


class _Halves:
    """A vocabulary that two threads share; each calls with its own part."""

    def __init__(self, meeting: Barrier, left: list[Tensor | None], place: int, first: int) -> None:
        self._meeting, self._left, self._place, self.first = meeting, left, place, first

    def log_sum_exp(self, own: Tensor) -> Tensor:
        return torch.logaddexp(*self._both(own))

    def add_up(self, own: Tensor) -> Tensor:
        first, second = self._both(own)
        return first + second

    def _both(self, own: Tensor) -> tuple[Tensor, Tensor]:
        self._left[self._place] = own
        self._meeting.wait()
        first, second = self._left
        self._meeting.wait()
        return first, second


def _half(adapter: Adapter, rows: slice) -> Adapter:
    pairs = {name: LoRAPair(a, b[rows]) for name, (a, b) in adapter.pairs.items()}
    return Adapter.of(adapter.spec, pairs)


def test_two_parts_of_a_vocabulary_give_what_the_whole_gives(problem):
    """The second is larger, and has all targets of some tokens."""
    hidden, weight, targets, upstream = problem
    targets[5:9] = 40
    parts = _parts("alone")
    whole = target_logprobs(hidden, weight, targets, parts, chunk=5)
    [expected_h] = torch.autograd.grad(whole, hidden, upstream)
    expected = [part.take_gradients()[0] for part in parts if part.gradient is not None]
    meeting, left = Barrier(2, timeout=60), [None, None]

    def compute(place: int):
        rows = (slice(0, 20), slice(20, VOCAB))[place]
        owners = [owner._replace(adapter=_half(owner.adapter, rows)) for owner in OWNERS]
        parts = [Segment.of(owner, F32) for owner in owners]
        h = hidden.detach().requires_grad_()
        vocabulary = _Halves(meeting, left, place, rows.start)
        found = target_logprobs(h, weight[rows], targets, parts, 5, vocabulary)
        found.backward(upstream)
        return found, h.grad, [part.take_gradients()[0] for part in parts], owners

    with ThreadPoolExecutor(2) as threads:
        first, second = threads.map(compute, range(2))
    for found in (first[0], second[0]):
        torch.testing.assert_close(found, whole)
    torch.testing.assert_close(first[1] + second[1], expected_h)
    for i, owner in enumerate(OWNERS):
        if UNEMBED not in owner.adapter.pairs:
            continue
        a, b = owner.adapter.layout.pair(expected[i], UNEMBED)
        ones, others = (
            half[3][i].adapter.layout.pair(half[2][i], UNEMBED) for half in (first, second)
        )
        torch.testing.assert_close(ones.a + others.a, a)
        torch.testing.assert_close(torch.cat([ones.b, others.b]), b)
