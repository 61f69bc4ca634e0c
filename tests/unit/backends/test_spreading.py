"""How the datums of a pass are spread over ranks."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from backends.batching.spreading import spread

_REQUESTS = st.lists(st.tuples(st.lists(st.integers(1, 60), max_size=6), st.booleans()), max_size=8)


@given(_REQUESTS, st.integers(1, 64), st.integers(0, 12), st.integers(1, 5))
def test_every_datum_is_in_one_microbatch_and_in_order(requests, max_tokens, shared, num_ranks):
    lengths, backward = [r[0] for r in requests], [r[1] for r in requests]
    rounds = spread(lengths, backward, max_tokens, shared, num_ranks)
    pieces = [p for one in rounds for m in one.microbatches for p in m.pieces]
    expected = [(r, d) for r, of_request in enumerate(lengths) for d in range(len(of_request))]
    assert sorted((p.request, p.datum) for p in pieces) == expected
    for kind in (True, False):
        order = [(p.request, p.datum) for p in pieces if p.backward is kind]
        assert order == sorted(order)
    assert all(p.num_tokens == lengths[p.request][p.datum] for p in pieces)


@given(_REQUESTS, st.integers(1, 64), st.integers(0, 12), st.integers(1, 5))
def test_rounds_keep_ranks_in_step_and_memory_bounded(requests, max_tokens, shared, num_ranks):
    lengths, backward = [r[0] for r in requests], [r[1] for r in requests]
    for one in spread(lengths, backward, max_tokens, shared, num_ranks):
        assert len(one.microbatches) == num_ranks
        assert any(m.pieces for m in one.microbatches)
        for microbatch in one.microbatches:
            assert microbatch.num_tokens <= max_tokens or len(microbatch.pieces) == 1
            assert one.backward or not microbatch.backward


@given(st.lists(st.integers(1, 60), min_size=1), st.integers(1, 5))
def test_ranks_get_equal_shares_but_for_one_datum(lengths, num_ranks):
    [one] = spread([lengths], [True], 10**6, 0, num_ranks)
    tokens = [microbatch.num_tokens for microbatch in one.microbatches]
    assert max(tokens) <= sum(lengths) / num_ranks + max(lengths)


def test_a_little_that_only_goes_forward_joins_what_needs_gradients():
    together = spread([[30], [4]], [True, False], 100, 12, 2)
    assert [one.backward for one in together] == [True]
    apart = spread([[30], [40]], [True, False], 100, 12, 2)
    assert [one.backward for one in apart] == [True, False]
