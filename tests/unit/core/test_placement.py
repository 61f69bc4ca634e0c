"""Runs go where least is going on, and nobody is moved to and fro."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from server.core.ids import RunId
from server.core.placement import LATELY_S, ONE_BUSY, Group, Load, load_of, placed, relief

counts = st.integers(0, 20)
loads = st.builds(
    lambda busy, lately, idle: Load(busy + lately, busy, busy + lately + idle),
    counts,
    counts,
    counts,
)


@st.composite
def groups(draw: st.DrawFn) -> list[Group]:
    one = st.tuples(loads, st.booleans(), st.booleans())
    return [
        Group(name=f"g{number}", load=load, alive=alive, open=open_)
        for number, (load, alive, open_) in enumerate(draw(st.lists(one, min_size=1, max_size=6)))
    ]


def runs(count: int) -> list[RunId]:
    return [RunId(f"r{number}") for number in range(count)]


def usable(all_groups: list[Group]) -> list[Group]:
    taking = [group for group in all_groups if group.open]
    return [group for group in taking if group.alive] or taking


@given(groups(), st.integers(0, 30))
def test_every_run_is_placed_where_runs_are_taken_by_the_living_if_there_are_any(
    given_groups: list[Group], count: int
):
    chosen = placed(runs(count), given_groups)
    allowed = {group.name for group in usable(given_groups)}
    assert set(chosen.values()) <= allowed
    assert list(chosen) == (runs(count) if allowed else [])


@given(groups(), st.integers(0, 30))
def test_whoever_gets_a_run_is_then_above_nobody_by_more_than_it(
    given_groups: list[Group], count: int
):
    got = Counter(placed(runs(count), given_groups).values())
    after = {group.name: group.load.working + got[group.name] for group in usable(given_groups)}
    for name, number in got.items():
        if number:
            assert after[name] - 1 <= min(after.values())


@given(groups())
def test_one_after_the_other_is_the_same_as_together(given_groups: list[Group]):
    together = placed(runs(7), given_groups)
    alone = {}
    for run in runs(7):
        alone |= placed([run], given_groups)
        given_groups = [
            replace(group, load=group.load + ONE_BUSY) if group.name == alone.get(run) else group
            for group in given_groups
        ]
    assert alone == together


def test_new_runs_that_have_sent_nothing_yet_count_already():
    silent = load_of([(False, 1)])
    assert placed(runs(1), [Group(name="a", load=silent), Group(name="b", load=Load())]) == {
        "r0": "b"
    }


def test_runs_that_are_silent_for_long_count_least():
    forgotten = load_of([(False, LATELY_S), (False, 2 * LATELY_S)])
    many = [Group(name="a", load=forgotten), Group(name="b", load=load_of([(True, 0)]))]
    assert placed(runs(1), many) == {"r0": "a"}
    assert placed(runs(1), [many[0], Group(name="c", load=Load())]) == {"r0": "c"}


@given(groups())
def test_relief_ends_with_groups_that_differ_by_one_run_at_most(given_groups: list[Group]):
    named = {group.name: group for group in given_groups}
    busy = Counter({group.name: group.load.busy for group in given_groups})
    moves = 0
    while (way := relief(list(named.values()))) is not None:
        source, target = way
        assert named[source].alive
        assert named[target].alive
        assert named[target].open
        assert busy[source] >= busy[target] + 2
        moves += 1
        for name, change in ((source, -1), (target, 1)):
            busy[name] += change
            load = named[name].load
            named[name] = replace(named[name], load=replace(load, busy=load.busy + change))
    taking = [busy[group.name] for group in given_groups if group.open and group.alive]
    assert not taking or max(taking) - min(taking) <= 1
    assert moves <= sum(busy.values())


def test_two_groups_with_one_run_between_them_are_left_alone():
    assert relief([Group(name="a", load=ONE_BUSY), Group(name="b", load=Load())]) is None
