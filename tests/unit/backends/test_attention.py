"""Packed attention against each sequence alone: transformers' own, and the formula in float64."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from transformers.models.llama.modeling_llama import eager_attention_forward

from backends.batching import attention
from backends.batching.attention import PackedAttention, VarlenAttention, packed_attention

HEADS, KV_HEADS, HEAD_SIZE = 6, 2, 16
SCALE = 0.3
CPU = torch.device("cpu")

MIXES = {
    "one sequence": [9],
    "equal ones": [5] * 7,
    "equal neighbours among others": [3, 3, 8, 3, 1, 1, 1, 12],
    "single tokens": [1, 1],
}
lengths_ = st.lists(st.integers(1, 12), min_size=1, max_size=12)


def _projections(num_tokens: int, heads: int = HEADS, dtype=torch.float32) -> list[Tensor]:
    """q[H, T, D], k[G, T, D] and v[G, T, D] as a model's layers lay them out in memory."""
    generator = torch.Generator().manual_seed(num_tokens)
    return [
        torch.randn(num_tokens, h, HEAD_SIZE, generator=generator, dtype=dtype)
        .transpose(0, 1)
        .requires_grad_()
        for h in (heads, KV_HEADS, KV_HEADS)
    ]


def _by_transformers(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """One sequence."""
    module = nn.Module()
    module.num_key_value_groups = len(q) // len(k)
    future = torch.ones(q.shape[1], q.shape[1], dtype=torch.bool).triu(1)
    mask = torch.zeros(future.shape, dtype=q.dtype).masked_fill(future, float("-inf"))
    out, _ = eager_attention_forward(module, q[None], k[None], v[None], mask[None, None], SCALE)
    return out[0].transpose(0, 1)


def _one_by_one(q: Tensor, k: Tensor, v: Tensor, lengths: list[int]) -> Tensor:
    parts = zip(*(t.split(lengths, dim=1) for t in (q, k, v)), strict=True)
    return torch.cat([_by_transformers(*part) for part in parts], dim=1)


def _gradients(out: Tensor, leaves: list[Tensor]) -> tuple[Tensor, ...]:
    weights = torch.arange(out.numel(), dtype=out.dtype).reshape(out.shape).sin()
    return torch.autograd.grad((out * weights).sum(), leaves)


def _assert_same(plan, lengths: list[int], heads: int = HEADS) -> None:
    leaves = _projections(sum(lengths), heads)
    exact = [leaf.detach().double().requires_grad_() for leaf in leaves]
    expected = _one_by_one(*exact, lengths)
    got = plan.attend(0, *leaves, SCALE)
    assert got.shape == (heads, sum(lengths), HEAD_SIZE)
    torch.testing.assert_close(got.double(), expected, rtol=1e-5, atol=1e-5)
    for ours, theirs in zip(_gradients(got, leaves), _gradients(expected, exact), strict=True):
        torch.testing.assert_close(ours.double(), theirs, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("heads", [HEADS, KV_HEADS], ids=["grouped queries", "equal heads"])
@pytest.mark.parametrize("lengths", MIXES.values(), ids=MIXES)
def test_each_sequence_attends_as_it_does_alone_in_transformers(lengths, heads):
    _assert_same(PackedAttention(lengths), lengths, heads)


@settings(deadline=None)
@given(lengths_)
def test_any_mix_of_lengths_is_attended_sequence_by_sequence(lengths):
    _assert_same(PackedAttention(lengths), lengths)


def test_a_thousand_sequences_of_one_length_are_one_call_of_the_kernel(monkeypatch):
    calls = []

    def counted(q: Tensor, *args, **options) -> Tensor:
        calls.append(tuple(q.shape))
        return kernel(q, *args, **options)

    kernel = F.scaled_dot_product_attention
    monkeypatch.setattr(F, "scaled_dot_product_attention", counted)
    PackedAttention([16] * 1000 + [7]).attend(0, *_projections(16_007), SCALE)
    assert calls == [(1000, HEADS, 16, HEAD_SIZE), (1, HEADS, 7, HEAD_SIZE)]


def _varlen_by_its_documentation(
    query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, *, scale, window_size, enable_gqa
) -> Tensor:
    """torch's kernel, which no CPU has: [T, H, D] in and out, sequence i at cu[i]..cu[i + 1]."""
    assert cu_seq_q.dtype == cu_seq_k.dtype == torch.int32
    assert torch.equal(cu_seq_q, cu_seq_k)
    assert window_size == (-1, 0)  # "for causal attention"
    assert enable_gqa == (query.shape[1] != key.shape[1])
    assert scale == SCALE
    lengths = cu_seq_q.diff().tolist()
    assert max_q == max_k == max(lengths)
    rows = (t.transpose(0, 1) for t in (query, key, value))
    return _one_by_one(*rows, lengths).transpose(0, 1)


@pytest.mark.parametrize("heads", [HEADS, KV_HEADS], ids=["grouped queries", "equal heads"])
@pytest.mark.parametrize("lengths", MIXES.values(), ids=MIXES)
def test_the_varlen_kernel_is_told_where_sequences_lie(monkeypatch, lengths, heads):
    monkeypatch.setattr(attention, "varlen_attn", _varlen_by_its_documentation)
    _assert_same(VarlenAttention(lengths, CPU), lengths, heads)


@pytest.mark.parametrize(
    ("device", "dtype", "capability", "kernel"),
    [
        ("cpu", torch.float32, None, PackedAttention),
        ("cpu", torch.bfloat16, None, PackedAttention),
        ("cuda", torch.float32, (9, 0), PackedAttention),
        ("cuda", torch.bfloat16, (7, 5), PackedAttention),
        ("cuda", torch.bfloat16, (8, 0), VarlenAttention),
        ("cuda", torch.float16, (9, 0), VarlenAttention),
    ],
)
def test_the_kernel_is_for_half_precision_on_a_gpu_that_has_it(
    monkeypatch, device, dtype, capability, kernel
):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    made = []
    monkeypatch.setattr(VarlenAttention, "__init__", lambda self, *args: made.append(args))
    plan = packed_attention([3, 4], torch.device(device), dtype)
    assert type(plan) is kernel
    assert made == ([([3, 4], torch.device(device))] if kernel is VarlenAttention else [])
