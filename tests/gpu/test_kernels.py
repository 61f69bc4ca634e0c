"""The kernels that only a GPU has against plain loops over sequences and adapters."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from backends.batching.attention import PackedAttention, VarlenAttention, packed_attention
from backends.lora.adapter import Adapter, LoRAPair
from backends.lora.grouping import arranged
from backends.lora.groups import RaggedGroup
from backends.lora.parts import Owner, Part
from tests.gpu.models import every_layer

LENGTHS = [300, 1, 17, 17, 17, 128, 511, 64]
HEADS, KV_HEADS, HEAD_SIZE = 8, 2, 64
HALF = [torch.bfloat16, torch.float16]


def _projections(device: torch.device, dtype: torch.dtype) -> list[Tensor]:
    """q[H, T, D], k[G, T, D], v[G, T, D]"""
    generator = torch.Generator().manual_seed(0)
    return [
        torch.randn(sum(LENGTHS), heads, HEAD_SIZE, generator=generator)
        .to(device, dtype)
        .transpose(0, 1)
        .requires_grad_()
        for heads in (HEADS, KV_HEADS, KV_HEADS)
    ]


def _attend(plan, leaves: list[Tensor]) -> list[Tensor]:
    """The output and the gradients of all three."""
    out = plan.attend(0, *leaves, HEAD_SIZE**-0.5)
    weights = torch.arange(out.numel(), device=out.device).sin().reshape(out.shape)
    return [out.detach(), *torch.autograd.grad((out.float() * weights).sum(), leaves)]


@pytest.mark.parametrize("dtype", HALF, ids=str)
def test_attention_of_this_device_is_that_of_each_sequence_alone(device, report, dtype):
    plan = packed_attention(LENGTHS, device, dtype)
    got = _attend(plan, _projections(device, dtype))
    exact = [leaf.detach().float().requires_grad_() for leaf in _projections(device, dtype)]
    expected = _attend(PackedAttention(LENGTHS), exact)
    worst = max(_relative(a, b) for a, b in zip(got, expected, strict=True))
    report(f"{type(plan).__name__} in {dtype}: {worst:.1e} of the norm off the loop in float32")
    assert worst < 0.01
    if device.type == "cuda" and torch.cuda.get_device_capability(device) >= (8, 0):
        assert isinstance(plan, VarlenAttention)


def _pairs(rank: int, seed: int, device: torch.device) -> Adapter:
    generator = torch.Generator().manual_seed(seed)
    pairs = {
        name: LoRAPair(
            torch.randn(rank, size_in, generator=generator) / size_in**0.5,
            torch.randn(size_out, rank, generator=generator) / rank**0.5,
        )
        for name, size_in, size_out in (("up", 512, 1536), ("down", 1536, 512))
    }
    return Adapter.of(every_layer(rank, seed), pairs).to(device)


def _products(parts: Sequence[Part], dtype: torch.dtype, device: torch.device) -> list[Tensor]:
    """The products added to y, the gradients of x, and of each adapter."""
    generator = torch.Generator().manual_seed(1)
    sizes = (512, 1536, 1536, 512)
    x, y, grad_y, grad_x = (
        torch.randn(sum(LENGTHS), size, generator=generator).to(device, dtype) for size in sizes
    )
    lows = [part.add_product("up", x, y) for part in parts]
    for part, low in zip(parts, lows, strict=True):
        part.add_gradient("up", x, grad_y, low, grad_x)
    return [y, grad_x, *(g for part in parts for g in part.take_gradients() if g is not None)]


@pytest.mark.parametrize("dtype", [torch.float32, *HALF], ids=str)
def test_grouped_products_are_those_of_each_adapter_alone(device, report, dtype):
    ends = torch.tensor(LENGTHS).cumsum(0).tolist()
    owners = [
        Owner(end - length, end, _pairs(16, seed, device), backward=True)
        for seed, (length, end) in enumerate(zip(LENGTHS, ends, strict=True))
    ]
    got = _products([RaggedGroup.of(owners, dtype)], dtype, device)
    alone = [part for owner in owners for part in arranged([owner], dtype)]
    expected = _products(alone, dtype, device)
    worst = max(_relative(a, b) for a, b in zip(got, expected, strict=True))
    report(f"grouped products in {dtype}: {worst:.1e} of the norm off those one by one")
    assert worst < (1e-5 if dtype == torch.float32 else 0.01)


def _relative(got: Tensor, expected: Tensor) -> float:
    return float((got.double() - expected.double()).norm() / expected.double().norm())
