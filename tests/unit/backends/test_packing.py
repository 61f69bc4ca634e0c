from __future__ import annotations

from itertools import chain, pairwise

from hypothesis import given
from hypothesis import strategies as st

from backends.batching.packing import pack

requests = st.lists(st.tuples(st.lists(st.integers(1, 40), max_size=6), st.booleans()), max_size=8)
budgets = st.integers(1, 60)


def _pack(made: list[tuple[list[int], bool]], budget: int):
    return pack([lengths for lengths, _ in made], [backward for _, backward in made], budget)


@given(requests, budgets)
def test_every_datum_goes_once_with_its_length_and_its_own_kind(made, budget):
    seen = {
        (p.request, p.datum): (p.num_tokens, m.backward)
        for m in _pack(made, budget)
        for p in m.pieces
    }
    expected = {
        (i, j): (length, backward)
        for i, (lengths, backward) in enumerate(made)
        for j, length in enumerate(lengths)
    }
    assert seen == expected
    assert sum(len(m.pieces) for m in _pack(made, budget)) == len(expected)


@given(requests, budgets)
def test_the_budget_is_kept_unless_one_datum_alone_passes_it(made, budget):
    for microbatch in _pack(made, budget):
        assert microbatch.num_tokens <= budget or len(microbatch.pieces) == 1


@given(requests, budgets)
def test_neighbouring_microbatches_of_one_kind_could_not_have_been_one(made, budget):
    microbatches = _pack(made, budget)
    for first, second in pairwise(microbatches):
        if first.backward == second.backward:
            assert first.num_tokens + second.pieces[0].num_tokens > budget


@given(requests, budgets)
def test_datums_keep_their_order_and_requests_lie_in_one_span(made, budget):
    microbatches = _pack(made, budget)
    for kind in (True, False):
        order = [p[:2] for m in microbatches if m.backward == kind for p in m.pieces]
        assert order == sorted(order)
    for microbatch in microbatches:
        spans = microbatch.spans
        assert len({span.request for span in spans}) == len(spans)
        edges = list(chain.from_iterable((s.start, s.end) for s in spans))
        assert edges == sorted(edges)
        assert (edges[0], edges[-1]) == (0, microbatch.num_tokens)


@given(requests, budgets)
def test_splitting_ends_in_single_datums_and_loses_none(made, budget):
    for microbatch in _pack(made, budget):
        waiting, alone = [microbatch], []
        while waiting:
            current = waiting.pop(0)
            parts = current.split()
            waiting = parts + waiting
            if not parts:
                alone.append(current)
        assert tuple(chain.from_iterable(m.pieces for m in alone)) == microbatch.pieces
        assert all(len(m.pieces) == 1 for m in alone)
