from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from backends.sampling.vllm.routing import (
    OVERLOAD_SAMPLES,
    ReplicaView,
    RoutedRequest,
    choose,
)


def view(name: str, load: int, *adapters: str) -> ReplicaView:
    return ReplicaView(name=name, load=load, adapters=frozenset(adapters))


def routed(adapter: str | None = None, stuck_to: str | None = None) -> RoutedRequest:
    return RoutedRequest(adapter=adapter, session="s", stuck_to=stuck_to)


def test_a_session_stays_where_it_is_though_others_are_idle():
    replicas = [view("a", 5), view("b", 0, "x")]
    assert choose(replicas, routed("x", stuck_to="a")) == "a"


def test_a_session_leaves_a_replica_that_is_overloaded_or_gone():
    replicas = [view("a", OVERLOAD_SAMPLES, "x"), view("b", 0)]
    assert choose(replicas, routed("x", stuck_to="a")) == "b"
    assert choose(replicas, routed("x", stuck_to="gone")) == "b"


def test_a_new_one_goes_to_the_least_loaded_that_holds_the_adapter():
    replicas = [view("a", 1), view("b", 9, "x"), view("c", 7, "x"), view("d", 0)]
    assert choose(replicas, routed("x")) == "c"


def test_else_to_the_least_loaded():
    replicas = [view("a", 3, "x"), view("b", 1, "x"), view("c", 2)]
    assert choose(replicas, routed("y")) == "b"
    assert choose(replicas, routed(None)) == "b"


views = st.builds(
    ReplicaView,
    name=st.sampled_from("abcdefgh"),
    load=st.integers(0, 100),
    adapters=st.frozensets(st.sampled_from("xyz")),
)


@given(
    st.lists(views, min_size=1, unique_by=lambda v: v.name),
    st.builds(
        RoutedRequest,
        adapter=st.none() | st.sampled_from("xyz"),
        session=st.text(),
        stuck_to=st.none() | st.sampled_from("abcdefgh"),
    ),
)
def test_nobody_is_sent_where_it_is_crowded_and_order_does_not_matter(replicas, request):
    name = choose(replicas, request)
    chosen = next(v for v in replicas if v.name == name)
    assert chosen.load - min(v.load for v in replicas) < OVERLOAD_SAMPLES
    assert choose(replicas[::-1], request) == name
