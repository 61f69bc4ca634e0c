"""A timeline that viewers can draw: in each row slices follow each other and none is lost."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from server.core.ids import SessionId
from server.core.requests import Kind, State
from server.traces.queries import Traced
from server.traces.timeline import Timeline

SESSION = SessionId("session-1")
NOW = 100.0


def traced(
    seq: int, created: float, waited: float | None, computed: float | None, run: int = 0
) -> Traced:
    """None: that has not ended, or not begun."""
    started = None if waited is None else created + waited
    finished = None if started is None or computed is None else started + computed
    return Traced(
        id=f"{SESSION}:train:{run}:{seq}",
        kind=Kind.FORWARD_BACKWARD,
        source=f"{SESSION}:train:{run}",
        seq=seq,
        tokens=1,
        state=State.WAITING if finished is None else State.DONE,
        created_at=created,
        started_at=started,
        finished_at=finished,
        error_category=None,
    )


def drawn(requests: list[Traced]) -> list[dict[str, Any]]:
    timeline = Timeline(SESSION, 0.0, NOW)
    events = [timeline.begin()]
    for request in sorted(requests, key=lambda r: (r.created_at, r.id)):
        events += timeline.waited(request)
    taken = [r for r in requests if r.started_at is not None]
    for request in sorted(taken, key=lambda r: (r.started_at or 0, r.id)):
        events += timeline.computed(request)
    return events


times = st.floats(0, 10, allow_nan=False).map(lambda x: round(x, 3))
lives = st.lists(
    st.tuples(times, st.none() | times, st.none() | times, st.integers(0, 2)), max_size=40
).map(lambda facts: [traced(seq, *life) for seq, life in enumerate(facts)])


@given(lives)
@settings(deadline=None)
def test_slices_of_a_row_never_overlap(requests: list[Traced]):
    rows = defaultdict(list)
    for event in drawn(requests):
        if event["ph"] == "X":
            rows[event["tid"]].append((event["ts"], event["ts"] + event["dur"]))
    for row in rows.values():
        ends = [end for _, end in sorted(row)]
        starts = [start for start, _ in sorted(row)]
        # A microsecond is lost to rounding.
        assert all(end <= start + 1 for end, start in zip(ends, starts[1:], strict=False))


@given(lives)
@settings(deadline=None)
def test_every_row_has_one_name_and_every_request_its_slices(requests: list[Traced]):
    events = drawn(requests)
    named = [event["tid"] for event in events if event["name"] == "thread_name"]
    slices = [event for event in events if event["ph"] == "X"]
    assert sorted(named) == sorted({event["tid"] for event in slices})
    started = sum(request.started_at is not None for request in requests)
    assert len(slices) == len(requests) + started


def test_requests_that_overlap_get_rows_of_their_own():
    events = drawn([traced(1, 0, 0, 10), traced(2, 5, 0, 10), traced(3, 12, 0, 1)])
    rows = {
        event["tid"]: event["args"]["name"] for event in events if event["name"] == "thread_name"
    }
    computed = {
        event["args"]["seq_id"]: rows[event["tid"]]
        for event in events
        if event.get("cat") == "compute"
    }
    assert computed == {
        1: "train:0 compute",
        2: "train:0 compute (2)",
        3: "train:0 compute",
    }


def test_what_is_not_over_lasts_until_now():
    waiting, computing = drawn([traced(1, 40, None, None)]), drawn([traced(1, 40, 5, None)])
    assert [event["dur"] for event in waiting if event["ph"] == "X"] == [60_000_000]
    assert [event["dur"] for event in computing if event["ph"] == "X"] == [5_000_000, 55_000_000]
