"""Virtual counters: no saved-up credit, and weights."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from server.core.fairness import VirtualCounters


def test_who_comes_back_from_idling_has_no_credit():
    counters = VirtualCounters()
    counters.set_active({"a", "b"})
    counters.charge("a", 10)
    counters.set_active({"b"})
    counters.charge("b", 1000)
    counters.set_active({"a", "b"})

    assert counters.served("a") == counters.served("b") == 1000


def test_who_comes_back_keeps_its_debt():
    counters = VirtualCounters()
    counters.set_active({"a", "b"})
    counters.charge("a", 500)
    counters.set_active({"b"})
    counters.set_active({"a", "b"})

    assert counters.served("a") == 500


def test_when_nobody_stayed_all_start_alike():
    counters = VirtualCounters()
    counters.set_active({"a"})
    counters.charge("a", 700)
    counters.set_active(())
    counters.set_active({"a", "b"})

    assert counters.served("b") == counters.served("a") == 700


def test_twice_the_weight_is_half_the_charge():
    counters = VirtualCounters({"heavy": 2.0})
    counters.charge("heavy", 100)
    counters.charge("light", 100)
    assert (counters.served("heavy"), counters.served("light")) == (50, 100)


def test_a_trial_is_charged_alone_and_by_the_same_weights():
    counters = VirtualCounters({"a": 2.0})
    counters.charge("a", 2)
    trial = counters.trial()
    trial.charge("a", 100)
    assert (counters.served("a"), trial.served("a")) == (1, 51)


def test_the_forgotten_are_as_new():
    counters = VirtualCounters()
    counters.charge("a", 1)
    counters.forget("a")
    counters.forget("never seen")
    assert counters.served("a") == 0


crowd = st.lists(
    st.tuples(st.frozensets(st.sampled_from("abcd")), st.integers(0, 100)), max_size=30
)


@given(crowd)
def test_counters_never_go_back_and_newcomers_are_never_below_who_stayed(steps):
    counters, before = VirtualCounters(), dict.fromkeys("abcd", 0.0)
    active: frozenset[str] = frozenset()
    for now, tokens in steps:
        counters.set_active(now)
        stayed = [counters.served(key) for key in now & active]
        for key in now - active:
            assert not stayed or counters.served(key) >= min(stayed)
        for key in sorted(now)[:1]:
            counters.charge(key, tokens)
        for key in "abcd":
            assert counters.served(key) >= before[key]
            before[key] = counters.served(key)
        active = now
