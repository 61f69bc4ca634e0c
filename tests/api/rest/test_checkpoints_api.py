"""Checkpoints and runs over REST: who sees which, for how long, at what cost."""

from __future__ import annotations

from typing import Any

import pytest
from sqlalchemy import event

from tests.api.rest.service import Api, url


@pytest.mark.parametrize(
    ("method", "action", "body"),
    [
        ("POST", "/publish", None),
        ("DELETE", "/publish", None),
        ("PUT", "/ttl", {"ttl_seconds": 7200}),
        ("DELETE", "", None),
        ("GET", "/external_weights_urls", None),
    ],
)
async def test_another_tenants_checkpoint_is_as_good_as_none(
    alice: Api, bob: Api, method: str, action: str, body: Any
):
    path = await alice.save(await alice.run(await alice.session()), "one")
    foreign = await bob.send(method, url(path) + action, body, 404)
    missing = await bob.send(method, url(path).replace("one", "two") + action, body, 404)
    assert foreign["detail"].replace("one", "two") == missing["detail"]
    await alice.send("POST", f"{url(path)}/publish")
    # What is public can be read. It still belongs to somebody else.
    await bob.send(method, url(path) + action, body, 404)
    await bob.post("weights_info", {"tinker_path": path})


async def test_a_lifetime_is_prolonged_by_rest_alone(alice: Api):
    path = await alice.save(await alice.run(await alice.session()), "one", ttl_seconds=3600)
    alice.clock.now += 3599
    await alice.send("PUT", f"{url(path)}/ttl", {"ttl_seconds": 3600})
    alice.clock.now += 3599
    await alice.app.state.rooms.checkpoints.remove_expired()
    await alice.post("weights_info", {"tinker_path": path})
    await alice.send("PUT", f"{url(path)}/ttl", {"ttl_seconds": None})
    alice.clock.now += 10 * 365 * 86400
    await alice.app.state.rooms.checkpoints.remove_expired()
    await alice.post("weights_info", {"tinker_path": path})


@pytest.mark.parametrize("seconds", [3599, 10 * 365 * 86400 + 1, 0, -1, 1.5, True])
async def test_a_lifetime_out_of_bounds_is_refused(alice: Api, seconds: Any):
    path = await alice.save(await alice.run(await alice.session()), "one")
    refused = await alice.send("PUT", f"{url(path)}/ttl", {"ttl_seconds": seconds}, 400)
    assert "ttl_seconds" in refused["detail"]
    copy = {"source_path": path, "destination_project_id": "p", "ttl_seconds": seconds}
    assert "ttl_seconds" in (await alice.post("copy_weights", copy, 400))["detail"]


async def test_runs_are_listed_by_project_and_move_with_their_session(alice: Api):
    here, there = await alice.session(), await alice.session(project_id="there")
    first, second = await alice.run(here), await alice.run(there)
    await alice.save(first, "one")

    async def listed(**query: str) -> set[str]:
        runs = (await alice.get("training_runs", **query))["training_runs"]
        return {run["training_run_id"] for run in runs}

    assert await listed() == {first, second}
    assert await listed(project_id="there") == {second}
    await alice.send("PUT", f"sessions/{here}/project", {"project_id": "there"})
    assert await listed(project_id="there") == {first, second}
    assert await listed(project_id="default") == set()
    # What is saved from now on is of that project too.
    await alice.save(first, "two")
    stored = (await alice.get("billing/usage/checkpoints/current", project_id="there"))["data"]
    assert [row["checkpoint_count"] for row in stored] == [2]


@pytest.mark.parametrize(
    "path", ["training_runs", "training_runs/{run}", "sessions", "sessions/{session}"]
)
async def test_a_scope_is_owned_or_accessible(alice: Api, path: str):
    session = await alice.session()
    path = path.format(session=session, run=await alice.run(session))
    owned = await alice.get(path, access_scope="owned")
    assert await alice.get(path, access_scope="accessible") == owned
    assert "access_scope" in (await alice.get(path, 400, access_scope="all"))["detail"]


async def test_a_long_listing_takes_no_more_queries_than_a_short_one(alice: Api):
    session = await alice.session()
    queries: list[str] = []
    engine = alice.app.state.rooms.ledger.db.engine.sync_engine

    def count(*arguments: Any) -> None:
        queries.append(arguments[2])

    async def cost(path: str) -> int:
        queries.clear()
        event.listen(engine, "before_cursor_execute", count)
        await alice.get(path)
        event.remove(engine, "before_cursor_execute", count)
        return len(queries)

    paths = "training_runs", "checkpoints"
    costs = {}
    for number in (1, 6):
        for index in range(number):
            await alice.save(await alice.run(session, 10 * number + index), "one")
        costs[number] = [await cost(path) for path in paths]
    assert costs[1] == costs[6]


async def test_a_session_finishes_for_one_of_three_reasons(alice: Api):
    session = await alice.session()
    answer = await alice.post(f"sessions/{session}/finish", {"reason": {"type": "bored"}}, 400)
    assert "reason.type" in answer["detail"]


async def test_a_key_of_the_owner_lets_somebody_else_copy(alice: Api, bob: Api):
    path = await alice.save(await alice.run(await alice.session()), "one")
    body = {"source_path": path, "destination_project_id": "p"}
    await bob.post("copy_weights", body, 404)
    headers = {"X-Tinker-Weights-Access-Token": alice.key or ""}
    copied = await bob.http.post("copy_weights", json=body, headers=headers)
    await bob.post("weights_info", {"tinker_path": copied.json()["tinker_path"]})
    await alice.post("weights_info", {"tinker_path": copied.json()["tinker_path"]}, 404)
    headers = {"X-Tinker-Weights-Access-Token": "tml-wrong"}
    assert (await bob.http.post("copy_weights", json=body, headers=headers)).status_code == 401


async def test_a_client_that_goes_away_is_no_failure_of_the_server(
    local: Api,
):
    async def receive() -> dict[str, Any]:
        return {"type": "http.disconnect"}

    sent: list[dict[str, Any]] = []

    async def send(message: dict[str, Any]) -> None:
        sent.append(message)

    for path in ("telemetry", "create_session"):
        scope = {
            "type": "http",
            "method": "POST",
            "path": f"/api/v1/{path}",
            "raw_path": b"",
            "query_string": b"",
            "headers": [],
        }
        await local.app(scope, receive, send)
    assert [message["status"] for message in sent if "status" in message] == [400, 400]
