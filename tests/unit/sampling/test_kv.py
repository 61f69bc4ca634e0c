from __future__ import annotations

import random

import pytest
import torch

from backends.sampling.kv import PromptKV, Row, RowStore, capacity_class


def filled(length: int, tag: int) -> PromptKV:
    kv = PromptKV(length)
    for layer in range(2):
        part = torch.full((3, length, 4), float(tag))
        kv.write(layer, 0, part, part + 0.5)
    return kv


@pytest.mark.parametrize(
    ("length", "capacity"), [(1, 64), (64, 64), (65, 128), (512, 512), (513, 1024), (1025, 1536)]
)
def test_capacity_is_fine_for_short_sequences_and_wastes_little_on_long(length, capacity):
    assert capacity_class(length) == capacity


def test_rows_keep_their_own_tokens_as_others_come_grow_and_go():
    store, rows = RowStore(), dict[int, Row]()
    chance = random.Random(0)
    for tag in range(200):
        if rows and chance.random() < 0.45:
            store.free(rows.pop(chance.choice(list(rows))))
        rows[tag] = store.fork(filled(chance.randint(1, 90), tag))
        for other, row in rows.items():
            for _ in range(chance.randint(0, 6)):
                store.make_room(row)
                for i, t in enumerate(row.slab.tensors):
                    t[row.index, :, row.length] = other + 0.5 * (i % 2)
                row.length += 1
        for other, row in rows.items():
            assert row.slab.rows[row.index] is row
            for i, view in enumerate(row.views()):
                assert view.shape == (3, row.length, 4)
                assert (view == other + 0.5 * (i % 2)).all()
    for row in rows.values():
        store.free(row)
    assert store.slabs == []


def test_unused_rows_are_given_back():
    store = RowStore()
    rows = [store.fork(filled(10, tag)) for tag in range(40)]
    slab = rows[0].slab
    assert slab.tensors[0].shape[0] == 40
    for row in rows[3:]:
        store.free(row)
    assert slab.tensors[0].shape[0] <= 12
    assert all((view == rows.index(row)).all() for row in rows[:3] for view in row.views()[::2])


def test_a_fork_leaves_its_prompt_alone():
    store, kv = RowStore(), filled(10, 1)
    row = store.fork(kv)
    row.slab.tensors[0][row.index] = 7.0
    assert (kv.tensors[0] == 1.0).all()
