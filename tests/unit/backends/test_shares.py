"""Adapters cut among ranks in every way that a base model can be."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from backends.lora.adapter import Layout
from backends.training.shares import Share, Shares

MODULES = (("column", 6, 8), ("row", 12, 4), ("late", 4, 4))


def _grid(tensor: int, pipeline: int, copies: int) -> list[dict[str, Share]]:
    """Of every rank: `late` is on the last of the stages, the others on the first."""
    return [
        _on_stage(stage, pipeline, rank, tensor)
        for stage in range(pipeline)
        for _ in range(copies)
        for rank in range(tensor)
    ]


def _on_stage(stage: int, pipeline: int, rank: int, tensor: int) -> dict[str, Share]:
    shares = {}
    if stage == 0:
        shares["column"] = Share((0, 6), (8 // tensor * rank, 8 // tensor * (rank + 1)))
        shares["row"] = Share((12 // tensor * rank, 12 // tensor * (rank + 1)), (0, 4))
    if stage == pipeline - 1:
        shares["late"] = Share((0, 4), (0, 4))
    return shares


grids = st.builds(_grid, *(st.sampled_from([1, 2, 4]), st.integers(1, 3), st.integers(1, 3)))
layouts = st.builds(
    Layout.of,
    st.integers(1, 3),
    st.lists(st.sampled_from(MODULES), min_size=1, unique=True).map(
        lambda chosen: tuple(module for module in MODULES if module in chosen)
    ),
)


@given(grids, layouts)
def test_the_parts_of_those_who_send_are_the_whole(grid, layout):
    whole = torch.arange(layout.num_elements, dtype=torch.float32)
    ranks = [Shares(grid, rank) for rank in range(len(grid))]
    parts = {sender: ranks[sender].cut(layout, whole) for sender in ranks[0].senders}
    assert torch.equal(ranks[-1].join(layout, parts), whole)


@given(grids, layouts)
def test_every_number_is_counted_by_one_rank(grid, layout):
    counted = []
    for rank in range(len(grid)):
        shares = Shares(grid, rank)
        part = shares.cut(layout, torch.arange(layout.num_elements, dtype=torch.float32))
        for cut in shares.cuts(layout):
            assert rank in cut.holders
            if cut.holders[0] == rank:
                counted += part[cut.start : cut.end].tolist()
    assert sorted(counted) == list(range(layout.num_elements))


@given(grids, layouts)
def test_holders_of_a_cut_have_the_same_numbers_in_the_same_order(grid, layout):
    whole = torch.arange(layout.num_elements, dtype=torch.float32)
    seen: dict[tuple[int, ...], list[list[float]]] = {}
    for rank in range(len(grid)):
        shares = Shares(grid, rank)
        part = shares.cut(layout, whole)
        for holders in shares.holders:
            if rank in holders:
                numbers = [
                    number
                    for cut in shares.cuts(layout)
                    if cut.holders == holders
                    for number in part[cut.start : cut.end].tolist()
                ]
                seen.setdefault(holders, []).append(numbers)
    for holders, lists in seen.items():
        assert lists == [lists[0]] * len(holders)


def test_a_part_is_a_vector_in_the_layout_of_what_is_there():
    grid = _grid(tensor=2, pipeline=2, copies=1)
    whole = Layout.of(2, MODULES)
    assert Shares(grid, 1).local(whole, 1).modules == (("column", 6, 4), ("row", 6, 4))
    assert Shares(grid, 1).local(whole, 3).modules == (("late", 4, 4),)
    flat = torch.arange(float(whole.num_elements))
    a, b = whole.pair(flat, "row")
    part = Shares(grid, 1)
    mine = part.local(whole, 1).pair(part.cut(whole, flat), "row")
    assert torch.equal(mine.a, a[:, 6:])
    assert torch.equal(mine.b, b)
