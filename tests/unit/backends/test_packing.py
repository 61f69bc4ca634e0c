from __future__ import annotations

from itertools import chain, pairwise

from hypothesis import given
from hypothesis import strategies as st

from backends.batching.packing import Microbatch, pack

requests = st.lists(st.tuples(st.lists(st.integers(1, 40), max_size=6), st.booleans()), max_size=8)
budgets = st.integers(1, 60)
shared = st.integers(0, 60)


def _pack(made: list[tuple[list[int], bool]], budget: int, shared: int) -> list[Microbatch]:
    lengths, backward = [lengths for lengths, _ in made], [backward for _, backward in made]
    return pack(lengths, backward, budget, shared)


def _tokens(microbatch: Microbatch, backward: bool) -> int:
    return sum(p.num_tokens for p in microbatch.pieces if p.backward == backward)


@given(requests, budgets, shared)
def test_every_datum_goes_once_with_its_length_and_its_own_kind(made, budget, shared):
    pieces = [p for m in _pack(made, budget, shared) for p in m.pieces]
    expected = [
        (i, j, length, backward)
        for i, (lengths, backward) in enumerate(made)
        for j, length in enumerate(lengths)
    ]
    assert sorted(pieces) == expected


@given(requests, budgets, shared)
def test_the_budget_is_kept_unless_one_datum_alone_passes_it(made, budget, shared):
    for microbatch in _pack(made, budget, shared):
        assert microbatch.num_tokens <= budget or len(microbatch.pieces) == 1


@given(requests, budgets, shared)
def test_only_a_small_rest_that_goes_forward_shares_a_microbatch_that_needs_gradients(
    made, budget, shared
):
    microbatches = _pack(made, budget, shared)
    mixed = [m for m in microbatches if _tokens(m, True) and _tokens(m, False)]
    assert len(mixed) <= 1
    for microbatch in mixed:
        assert microbatch.backward
        assert _tokens(microbatch, False) <= shared
        # Sharing saves a whole pass: nothing that goes forward is left for one of its own.
        alone = _pack([one for one in made if not one[1]], budget, 0)
        assert sum(not m.backward for m in microbatches) == len(alone) - 1


@given(requests, budgets, shared)
def test_a_small_rest_stays_apart_only_where_there_is_no_room(made, budget, shared):
    microbatches = _pack(made, budget, shared)
    kinds = {m.backward for m in microbatches}
    if kinds == {True, False} and not any(_tokens(m, False) for m in microbatches if m.backward):
        need_gradients = [m for m in microbatches if m.backward][-1]
        rest = microbatches[-1]
        assert rest.num_tokens > shared or need_gradients.num_tokens + rest.num_tokens > budget


@given(requests, budgets)
def test_neighbouring_microbatches_of_one_kind_could_not_have_been_one(made, budget):
    microbatches = _pack(made, budget, 0)
    for first, second in pairwise(microbatches):
        if first.backward == second.backward:
            assert first.num_tokens + second.pieces[0].num_tokens > budget


@given(requests, budgets, shared)
def test_datums_keep_their_order_and_requests_lie_in_one_span(made, budget, shared):
    microbatches = _pack(made, budget, shared)
    for kind in (True, False):
        order = [p[:2] for m in microbatches for p in m.pieces if p.backward == kind]
        assert order == sorted(order)
    for microbatch in microbatches:
        spans = microbatch.spans
        assert [span.request for span in spans] == sorted({span.request for span in spans})
        edges = list(chain.from_iterable((s.start, s.end) for s in spans))
        assert edges == sorted(edges)
        assert (edges[0], edges[-1]) == (0, microbatch.num_tokens)


@given(requests, budgets, shared)
def test_splitting_ends_in_single_datums_and_loses_none(made, budget, shared):
    for microbatch in _pack(made, budget, shared):
        waiting, alone = [microbatch], []
        while waiting:
            current = waiting.pop(0)
            parts = current.split()
            waiting = parts + waiting
            if not parts:
                alone.append(current)
        assert tuple(chain.from_iterable(m.pieces for m in alone)) == microbatch.pieces
        assert all(len(m.pieces) == 1 for m in alone)


def test_what_is_left_needs_gradients_only_if_one_of_its_datums_does():
    [mixed] = pack([[3], [4]], [True, False], max_tokens=10, shared_forward_tokens=4)
    assert mixed.backward
    assert not mixed.without({0}).backward
    assert mixed.without({1}).backward
    assert [part.backward for part in mixed.split()] == [True, False]
