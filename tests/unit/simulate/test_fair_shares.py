"""Jain's index and the fair split, against their formulas and by arithmetic."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from server.simulate.fairness import Shares, fair_split, jain

positive = st.floats(0.01, 1e4)


@pytest.mark.parametrize(
    ("shares", "index"),
    [
        ([5, 5, 5, 5], 1.0),
        ([1, 0, 0, 0], 0.25),
        ([1, 2, 3], 36 / (3 * 14)),
        ([], 1.0),
    ],
)
def test_jains_index_is_the_square_of_the_sum_over_n_times_the_sum_of_squares(shares, index):
    assert jain(np.array(shares, float)) == pytest.approx(index)


@given(st.lists(positive, min_size=1), positive)
def test_jains_index_has_its_bounds_and_no_scale(shares, factor):
    index = jain(np.array(shares))
    assert 1 / len(shares) - 1e-9 <= index <= 1 + 1e-9
    assert jain(factor * np.array(shares)) == pytest.approx(index)


@pytest.mark.parametrize(
    ("amount", "wanted", "weights", "split"),
    [
        (90, [100, 100, 100], [1, 1, 1], [30, 30, 30]),
        (90, [10, 100, 100], [1, 1, 1], [10, 40, 40]),
        (90, [10, 20, 100], [1, 1, 1], [10, 20, 60]),
        (90, [100, 100], [1, 2], [30, 60]),
        (90, [100, 30, 100], [1, 2, 1], [30, 30, 30]),
        (60, [10, 20, 30], [1, 1, 1], [10, 20, 30]),
    ],
)
def test_what_one_leaves_goes_to_the_others_by_weight(amount, wanted, weights, split):
    found = fair_split(amount, np.array(wanted, float), np.array(weights, float))
    assert found == pytest.approx(np.array(split))


@given(st.lists(st.tuples(positive, positive), min_size=1), st.floats(0.01, 1.0))
def test_the_fair_split_is_whole_and_nobody_can_be_helped_at_the_cost_of_a_richer_one(asked, share):
    wanted, weights = (np.array(column) for column in zip(*asked, strict=True))
    split = fair_split(share * wanted.sum(), wanted, weights)

    assert split.sum() == pytest.approx(share * wanted.sum())
    assert np.all(split <= wanted * (1 + 1e-9))
    level = split / weights
    short = split < wanted * (1 - 1e-6)
    assert np.all(level[short] >= level.max() * (1 - 1e-6))


def test_due_is_a_fair_part_of_every_pass_for_those_who_waited():
    shares = Shares([1.0, 1.0, 1.0])
    shares.begin(np.array([100.0, 100.0, 0.0]))
    shares.end({0: 80})
    assert shares.due.tolist() == [40.0, 40.0, 0.0]
    assert shares.got.tolist() == [80.0, 0.0, 0.0]

    shares.begin(np.array([20.0, 100.0, 0.0]))
    shares.end({1: 80})
    assert shares.due.tolist() == [60.0, 100.0, 0.0]
    # got / due is 80 / 60 and 80 / 100.
    assert shares.index(1) == pytest.approx((4 / 3 + 0.8) ** 2 / (2 * (16 / 9 + 0.64)))


def test_who_comes_while_a_pass_runs_is_due_for_what_is_left_of_it():
    shares = Shares([1.0, 1.0])
    shares.begin(np.array([100.0, 0.0]))
    shares.join(1, tokens=100, presence=0.5)
    shares.end({0: 90})
    assert shares.due.tolist() == pytest.approx([60.0, 30.0])


def test_only_those_are_counted_who_were_due_enough():
    shares = Shares([1.0, 1.0, 1.0])
    shares.begin(np.array([100.0, 100.0, 5.0]))
    shares.end({0: 45, 1: 45})
    assert shares.counted(10).tolist() == [True, True, False]
    assert shares.index(10) == pytest.approx(jain(np.array([45 / 42.5, 45 / 42.5])))
