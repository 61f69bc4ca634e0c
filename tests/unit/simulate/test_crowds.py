"""Synthetic tenants: how many of which kind, and what they ask for."""

from __future__ import annotations

from collections import Counter
from itertools import islice
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from server.simulate.workloads import DEFAULT_MIX, RANKS, WORKLOADS, crowd, mix_of


@given(
    st.integers(1, 300),
    st.dictionaries(st.sampled_from(list(WORKLOADS)), st.floats(0.1, 100), min_size=1),
)
def test_a_crowd_has_its_size_and_nearly_the_proportions_of_its_mix(size, mix):
    counts = Counter(one.kind for one in crowd(size, 0, mix))
    assert counts.total() == size
    for kind, share in mix.items():
        exact = size * share / sum(mix.values())
        assert abs(counts[kind] - exact) <= len(mix)
        assert counts[kind] >= (1 if size >= len(mix) else 0)


@pytest.mark.parametrize(
    ("size", "counts"),
    [
        (8, {"sft": 1, "rl": 1, "burst": 1, "flood": 1, "tail": 4}),
        (1000, {"sft": 30, "rl": 30, "burst": 50, "flood": 5, "tail": 885}),
    ],
)
def test_the_default_mix_is_mostly_of_those_who_come_rarely(size, counts):
    assert Counter(one.kind for one in crowd(size, 0)) == counts
    assert sum(DEFAULT_MIX.values()) == pytest.approx(1.0)


def test_tenants_take_the_weights_in_turn_and_have_ranks_of_the_list():
    tenants = crowd(50, 0, weights=(1.0, 4.0))
    assert [one.weight for one in tenants[:4]] == [1.0, 4.0, 1.0, 4.0]
    assert {one.rank for one in tenants} <= set(RANKS)
    assert [one.number for one in tenants] == list(range(50))


@pytest.mark.parametrize("kind", WORKLOADS)
def test_lengths_are_whole_tokens_around_the_typical_one_and_bounded(kind):
    workload = WORKLOADS[kind]
    rounds = list(islice(workload.rounds(Random(1), 100), 50))
    lengths = sorted(
        length for one in rounds for step in one.steps for batch in step.batches for length in batch
    )
    assert lengths[0] >= 1
    assert lengths[-1] <= 1600
    assert 80 < lengths[len(lengths) // 2] < 125
    assert all(one.pause_s >= 0 for one in rounds)


def test_rollouts_have_a_long_tail():
    """Of lognormal(0, 1) values 5 % are above exp(1.645) = 5.2 times the median."""
    rounds = islice(WORKLOADS["rl"].rounds(Random(1), 100), 100)
    lengths = sorted(length for one in rounds for length in one.steps[0].batches[0])
    assert lengths[int(0.95 * len(lengths))] == pytest.approx(520, rel=0.1)


def test_a_flood_is_200_batches_before_one_step():
    [one] = islice(WORKLOADS["flood"].rounds(Random(1), 100), 1)
    assert [len(step.batches) for step in one.steps] == [200]


def test_a_mix_is_written_as_kinds_and_numbers():
    assert mix_of("sft=3,tail=7.5") == {"sft": 3.0, "tail": 7.5}


@pytest.mark.parametrize(
    "text", ["", "sft", "sft=", "sft=-1", "sft=nan", "sft=inf", "who=1", "sft=0"]
)
def test_a_mix_that_cannot_be_is_refused(text):
    with pytest.raises(ValueError, match=r"mix|number"):
        mix_of(text)
