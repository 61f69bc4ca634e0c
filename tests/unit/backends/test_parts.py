"""One adapter alone, several by batched and by grouped products: the same numbers."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from backends.lora.adapter import Adapter, Layout
from backends.lora.grouping import MAX_MODULE, arranged, likeness, worth_stacking
from backends.lora.groups import EqualGroup, RaggedGroup, grouped_mm_takes, neighbours
from backends.lora.linear import Segment
from backends.lora.parts import Owner, Part
from tests.unit.backends.material import spec

SIZES = {"wide": (8, 16), "narrow": (16, 8)}
LAYOUT = Layout.of(4, tuple((name, i, o) for name, (i, o) in SIZES.items()))
KINDS = ["alone", "equal", "ragged"]


def _owners(lengths: list[int], backward: bool = True, first: int = 3) -> list[Owner]:
    owners, start = [], first
    for i, length in enumerate(lengths):
        generator = torch.Generator().manual_seed(i)
        flat = torch.randn(LAYOUT.num_elements, generator=generator)
        adapter = Adapter(spec(rank=4, seed=i), LAYOUT, flat)
        owners.append(Owner(start, start + length, adapter, backward))
        start += length
    return owners


def _parts(kind: str, owners: list[Owner], dtype: torch.dtype = torch.float32) -> list[Part]:
    if kind == "alone":
        return [Segment.of(owner, dtype) for owner in owners]
    return [{"equal": EqualGroup, "ragged": RaggedGroup}[kind].of(owners, dtype)]


def _expected(owners: list[Owner], module: str, x: Tensor, upstream: Tensor) -> list[Tensor]:
    """What is added to y, then the gradients of x and of each A and B, by autograd in float64."""
    x = x.double().requires_grad_()
    leaves = [
        [m.double().clone().requires_grad_() for m in owner.adapter.pairs[module]]
        for owner in owners
    ]
    y = torch.zeros(len(x), SIZES[module][1], dtype=torch.float64)
    for owner, (a, b) in zip(owners, leaves, strict=True):
        rows = slice(owner.start, owner.end)
        delta = torch.zeros_like(y)
        delta[rows] = (x[rows] @ a.T) @ b.T * (owner.adapter.spec.alpha / owner.adapter.spec.rank)
        y = y + delta
    grads = torch.autograd.grad(
        (y * upstream.double()).sum(), [x, *(leaf for pair in leaves for leaf in pair)]
    )
    return [y.detach(), *grads]


@pytest.mark.parametrize("module", SIZES)
@pytest.mark.parametrize(
    ("kind", "lengths"),
    [(k, [5, 5, 5]) for k in KINDS] + [("alone", [1, 7, 3]), ("ragged", [1, 7, 3]), ("equal", [4])],
)
def test_products_and_gradients_are_those_of_autograd_in_float64(kind, lengths, module):
    owners = _owners(lengths)
    parts = _parts(kind, owners)
    num_rows = owners[-1].end + 2
    num_in, num_out = SIZES[module]
    torch.manual_seed(1)
    x, upstream = torch.randn(num_rows, num_in), torch.randn(num_rows, num_out)
    base_y, base_grad = torch.randn(num_rows, num_out), torch.randn(num_rows, num_in)
    y, grad_x = base_y.clone(), base_grad.clone()
    for part in parts:
        low = part.add_product(module, x, y)
        part.add_gradient(module, x, upstream, low, grad_x)
    expected_y, expected_x, *expected = _expected(owners, module, x, upstream)
    torch.testing.assert_close((y - base_y).double(), expected_y, rtol=1e-5, atol=1e-4)
    torch.testing.assert_close((grad_x - base_grad).double(), expected_x, rtol=1e-5, atol=1e-3)
    flats = [flat for part in parts for flat in part.take_gradients()]
    got = [m for flat in flats for m in LAYOUT.pair(flat, module)]
    for matrix, wanted in zip(got, expected, strict=True):
        torch.testing.assert_close(matrix.double(), wanted, rtol=1e-5, atol=1e-3)
    (other,) = SIZES.keys() - {module}
    assert not any(m.any() for flat in flats for m in LAYOUT.pair(flat, other))


@pytest.mark.parametrize("kind", KINDS)
def test_a_second_gradient_is_added_and_a_part_of_it_lands_in_its_own_place(kind):
    owners = _owners([4, 4, 4], first=0)
    torch.manual_seed(2)
    x, upstream = torch.randn(12, 8), torch.randn(12, 16)
    whole, pieces = (_parts(kind, owners) for _ in range(2))
    for part in whole:
        low = part.add_product("wide", x, torch.zeros(12, 16))
        part.add_gradient("wide", x, upstream, low, None)
    for part in pieces:
        part.gradient.clear("wide")
    # Rows 0..6, then 6..12: the second adapter's four are cut in two.
    for first, last in ((0, 6), (6, 12)):
        for part in pieces:
            bounds = [(max(s, first) - first, min(e, last) - first) for s, e in part.bounds]
            for small in part.cut([(s, max(s, e)) for s, e in bounds]):
                low = small.add_product("wide", x[first:last], torch.zeros(6, 16))
                small.add_gradient("wide", x[first:last], upstream[first:last], low, None)
    for part, other in zip(whole, pieces, strict=True):
        for wanted, got in zip(part.take_gradients(), other.take_gradients(), strict=True):
            torch.testing.assert_close(got, wanted, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("kind", KINDS)
def test_without_a_wish_for_a_gradient_there_is_none(kind):
    parts = _parts(kind, _owners([3, 3], backward=False, first=0))
    for part in parts:
        x, grad_x = torch.randn(6, 8), torch.zeros(6, 8)
        low = part.add_product("wide", x, torch.zeros(6, 16))
        part.add_gradient("wide", x, torch.zeros(6, 16), low, grad_x)
        assert not grad_x.any()
    assert [flat for part in parts for flat in part.take_gradients()] == [None, None]


@pytest.mark.parametrize("kind", ["equal", "ragged"])
def test_under_a_bfloat16_model_a_group_computes_what_each_does_alone(kind):
    layout = Layout.of(8, (("wide", 8, 16),))
    adapters = [
        Adapter(spec(rank=8, seed=i), layout, torch.randn(layout.num_elements)) for i in range(3)
    ]
    owners = [Owner(4 * i, 4 * i + 4, adapter, True) for i, adapter in enumerate(adapters)]
    x, upstream = torch.randn(12, 8).bfloat16(), torch.randn(12, 16).bfloat16()
    ends = []
    for parts in (_parts("alone", owners, torch.bfloat16), _parts(kind, owners, torch.bfloat16)):
        y, grad_x = torch.zeros(12, 16).bfloat16(), torch.zeros(12, 8).bfloat16()
        for part in parts:
            low = part.add_product("wide", x, y)
            part.add_gradient("wide", x, upstream, low, grad_x)
        flats = [flat for part in parts for flat in part.take_gradients()]
        assert all(flat.dtype == torch.float32 for flat in flats)
        ends.append([y, grad_x, *flats])
    for got, wanted in zip(*ends, strict=True):
        torch.testing.assert_close(got, wanted, rtol=0.02, atol=0.02 * float(wanted.abs().max()))


def test_each_gradient_has_memory_of_its_own():
    (group,) = _parts("equal", _owners([2, 2, 2]))
    flats = group.take_gradients()
    assert all(flat.untyped_storage().nbytes() == flat.nbytes for flat in flats)


def test_the_kernel_is_asked_only_for_rows_of_whole_16_bytes():
    assert grouped_mm_takes(LAYOUT, torch.float32)
    assert not grouped_mm_takes(LAYOUT, torch.bfloat16)  # rank 4 is 8 bytes there
    assert not grouped_mm_takes(Layout.of(8, (("m", 8, 18),)), torch.bfloat16)


@given(st.lists(st.tuples(st.integers(0, 3), st.booleans())), st.booleans())
def test_neighbours_take_every_adapter_with_rows_once_and_are_as_long_as_can_be(rows, equal):
    """`rows` are lengths, and whether there is a gap before."""
    bounds, start = [], 0
    for length, gap in rows:
        start += gap
        bounds.append((start, start + length))
        start += length
    ranges = list(neighbours(bounds, equal=equal))
    assert [i for first, last in ranges for i in range(first, last)] == [
        i for i, (start, end) in enumerate(bounds) if end > start
    ]
    for first, last in ranges:
        inside = bounds[first:last]
        assert all(a[1] == b[0] for a, b in pairwise(inside))
        assert not equal or len({end - start for start, end in inside}) == 1
    for (_, end), (start, _) in pairwise(ranges):
        (s1, e1), (s2, e2) = bounds[end - 1], bounds[start]
        assert e1 != s2 or start > end or (equal and e1 - s1 != e2 - s2)


def _rows(parts: list[Part]) -> list[tuple[int, int]]:
    return [bounds for part in parts for bounds in part.bounds]


def test_short_neighbours_of_one_kind_are_stacked_and_others_stay_alone():
    owners = _owners([4, 4, 4, 6, 6, 5])
    owners[4] = owners[4]._replace(backward=False)
    parts = arranged(owners, torch.float32)
    assert [type(part) for part in parts] == [EqualGroup, Segment, Segment, Segment]
    assert _rows(parts) == [(o.start, o.end) for o in owners]
    louder = replace(owners[1].adapter, spec=replace(owners[1].adapter.spec, alpha=1.0))
    owners[1] = owners[1]._replace(adapter=louder)
    assert [type(part) for part in arranged(owners[:3], torch.float32)] == [Segment] * 3


def test_large_adapters_and_long_neighbours_stay_alone():
    large = Layout.of(32, (("m", MAX_MODULE, 1),))
    assert not worth_stacking(8, 4, large)
    assert not worth_stacking(8, 2**14, LAYOUT)
    assert not worth_stacking(1, 4, LAYOUT)
    assert worth_stacking(2, 4, LAYOUT)


def _likeness(owner: Owner) -> tuple[float, ...]:
    return likeness(owner.adapter.layout, owner.adapter.scale, owner.end - owner.start)


def test_sorting_by_likeness_brings_together_what_can_be_stacked():
    owners = _owners([4, 9, 4, 9, 4])
    ordered = sorted(owners, key=_likeness)
    assert [o.end - o.start for o in ordered] == [4, 4, 4, 9, 9]
