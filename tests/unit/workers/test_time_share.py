from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from backends.workers.time_share import TimeShare

COST = {"training": 2.0, "sampling": 0.1}


def run(share: TimeShare, ready: list[str], units: int) -> list[str]:
    chosen = []
    for _ in range(units):
        chosen.append(share.choose(ready))
        share.spend(chosen[-1], COST[chosen[-1]])
    return chosen


def test_both_get_the_same_time():
    chosen = run(TimeShare(), ["training", "sampling"], 2000)
    spent = {name: chosen.count(name) * cost for name, cost in COST.items()}
    assert abs(spent["training"] - spent["sampling"]) <= max(COST.values())


def test_idle_time_is_not_saved_up():
    share = TimeShare()
    run(share, ["sampling"], 500)
    assert run(share, ["training", "sampling"], 200).count("training") <= 10


@given(st.lists(st.sampled_from([["training"], ["sampling"], ["training", "sampling"]])))
def test_neither_waits_longer_than_the_other_ones_unit(history: list[list[str]]):
    share, waited = TimeShare(), dict.fromkeys(COST, 0.0)
    for ready in history:
        name = share.choose(ready)
        share.spend(name, COST[name])
        for other in COST:
            waited[other] = waited[other] + COST[name] if other in ready and other != name else 0.0
            assert waited[other] <= COST["training"] + COST["sampling"] + 1e-9
