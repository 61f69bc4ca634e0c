"""A session's trace can be fetched by anybody with the link, and tells the truth."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterable
from typing import Any

import pytest

from server.core.ids import RequestId
from tests.api.rest.service import Api
from tests.fake_backend import FakeBackend


async def export(api: Api, session: str) -> str:
    answer = await api.get(f"sessions/{session}/trace_export")
    assert answer["status"] == "ready"
    return answer["url"]


async def events(api: Api, session: str) -> list[dict[str, Any]]:
    stranger = Api(api.app, api.clock)
    answer = await stranger.http.get(await export(api, session))
    assert answer.status_code == 200
    assert int(answer.headers["content-length"]) == len(answer.content)
    # Viewers tell the format by these bytes.
    assert answer.content.startswith(b'{"traceEvents":[')
    return json.loads(answer.content)["traceEvents"]


def when_taken(api: Api, monkeypatch: pytest.MonkeyPatch) -> asyncio.Event:
    """Set once the dispatcher takes up a request."""
    taken = asyncio.Event()
    ledger = api.app.state.rooms.ledger
    mark_started = ledger.mark_started

    def mark(requests: Iterable[RequestId]) -> None:
        mark_started(requests)
        taken.set()

    monkeypatch.setattr(ledger, "mark_started", mark)
    return taken


async def test_it_tells_how_long_each_request_waited_and_computed(
    alice: Api, backend: FakeBackend, monkeypatch: pytest.MonkeyPatch
):
    session = await alice.session()
    run = await alice.run(session)
    taken = when_taken(alice, monkeypatch)
    backend.hold()
    first = await alice.post("forward_backward", alice.pass_body(run, 3))
    await taken.wait()
    alice.clock.now += 2
    second = await alice.post("forward_backward", alice.pass_body(run, 4))
    alice.clock.now += 3
    backend.let_go()
    await alice.outcome(first)
    await alice.outcome(second)

    slices = {
        (event["cat"], event["args"]["seq_id"]): (event["ts"], event["dur"], event["name"])
        for event in await events(alice, session)
        if event["ph"] == "X" and event["args"]["seq_id"] > 0
    }
    assert slices == {
        ("queued", 1): (0, 0, "forward_backward"),
        ("compute", 1): (0, 5_000_000, "forward_backward"),
        ("queued", 2): (2_000_000, 3_000_000, "forward_backward"),
        ("compute", 2): (5_000_000, 0, "forward_backward"),
    }


async def test_runs_and_samplers_have_rows_of_their_own(alice: Api):
    session = await alice.session()
    await alice.run(session, 0)
    await alice.run(session, 1)
    await alice.sample(await alice.sampler(session), prompt=3, max_tokens=2)
    names = {event["args"]["name"] for event in await events(alice, session) if event["ph"] == "M"}
    assert names == {
        session,
        *(
            f"{source} {phase}"
            for source in ("train:0", "train:1", "sample:0")
            for phase in ("queued", "compute")
        ),
    }


async def test_it_tells_of_failures_and_not_of_contents(alice: Api):
    session = await alice.session()
    run = await alice.run(session)
    await alice.train(run, 0)
    (failed,) = [
        event["args"]
        for event in await events(alice, session)
        if event["ph"] == "X" and event["args"]["state"] == "failed"
    ]
    assert failed == {
        "request_id": f"{run}:1",
        "seq_id": 1,
        "tokens": 0,
        "state": "failed",
        "error_category": "user",
    }


async def test_a_trace_is_built_again_only_when_there_is_more_to_tell(alice: Api):
    session = await alice.session()
    run = await alice.run(session)
    first = await export(alice, session)
    alice.clock.now += 10
    again = await export(alice, session)
    await alice.train(run, 3)
    later = await export(alice, session)
    file, same, other = (url.partition("?")[0] for url in (first, again, later))
    assert file == same != other


async def test_an_empty_session_has_a_trace(alice: Api):
    assert [event["ph"] for event in await events(alice, await alice.session())] == ["M"]


async def test_links_end_and_cannot_be_made_up(alice: Api):
    session = await alice.session()
    url = await export(alice, session)
    http = Api(alice.app, alice.clock).http
    assert (await http.get(url.replace("signature=", "signature=0"))).status_code == 404
    assert (await http.get(url.replace("expires=1", "expires=2"))).status_code == 404
    assert (await http.get(url.replace(session, "session-other"))).status_code == 404
    alice.clock.now += 3601
    assert (await http.get(url)).status_code == 404


async def test_another_tenants_session_does_not_exist(alice: Api, bob: Api):
    await bob.get(f"sessions/{await alice.session()}/trace_export", 404)
