"""The audit log tells of every change to checkpoints, keys and projects, to their owner."""

from __future__ import annotations

from typing import Any

import pytest

from tests.api.rest.service import DAY, Api, url


async def events(api: Api, **params: Any) -> list[str]:
    return [entry["event"] for entry in (await api.get("audit", **params))["entries"]]


async def test_the_life_of_a_checkpoint_is_told_in_order(alice: Api):
    run = await alice.run(await alice.session())
    path = await alice.save(run, "one", "save_weights_external")
    await alice.send("POST", f"{url(path)}/publish")
    await alice.send("DELETE", f"{url(path)}/publish")
    await alice.send("PUT", f"{url(path)}/ttl", {"ttl_seconds": 7200})
    await alice.get(f"{url(path)}/external_weights_urls")
    await alice.post("copy_weights", {"source_path": path, "destination_project_id": "archive"})
    await alice.send("DELETE", url(path))
    entries = (await alice.get("audit", event_type="checkpoints"))["entries"]
    assert [entry["event"] for entry in entries] == [
        "checkpoint_created",
        "checkpoint_published",
        "checkpoint_unpublished",
        "checkpoint_ttl_changed",
        "checkpoint_read",
        "checkpoint_copied",
        "checkpoint_deleted",
    ]
    assert {entry["event_details"]["actor"] for entry in entries} == {"tml:organization_user:alice"}
    assert {entry["tinker_path"] for entry in entries[:5]} == {path}
    assert entries[3]["event_details"]["ttl_seconds"] == 7200
    assert entries[4]["purpose"] == "download"
    assert entries[5]["event_details"]["source_path"] == path
    assert entries[5]["event_details"]["project_id"] == "archive"


async def test_what_changes_nothing_is_no_event(alice: Api):
    run = await alice.run(await alice.session())
    path = await alice.save(run, "one")
    await alice.send("DELETE", f"{url(path)}/publish")
    await alice.send("DELETE", url(path).replace("one", "two"), status=404)
    assert await events(alice, event_type="checkpoints") == ["checkpoint_created"]


async def test_a_lifetime_that_ends_is_told(alice: Api):
    run = await alice.run(await alice.session())
    await alice.save(run, "one", ttl_seconds=3600)
    alice.clock.now += 3600
    await alice.app.state.rooms.checkpoints.remove_expired()
    assert "checkpoint_expired" in await events(alice)


async def test_keys_and_projects_have_events_of_their_own(alice: Api):
    session = await alice.session()
    await alice.send("PUT", f"sessions/{session}/project", {"project_id": "new"})
    await alice.app.state.rooms.keys.create("spare", "alice", "default")
    await alice.app.state.rooms.keys.revoke("spare")
    assert await events(alice, event_type="organizations") == [
        "apikey_created",
        "apikey_created",
        "apikey_revoked",
    ]
    (moved,) = (await alice.get("audit", event_type="projects"))["entries"]
    assert moved["event"] == "project_assigned"
    assert moved["event_details"] == {
        "actor": "tml:organization_user:alice",
        "session_id": session,
        "project_id": "new",
        "previous_project_id": "default",
    }
    assert await events(alice, event_type="teams") == []


async def test_a_day_is_from_midnight_to_midnight_utc(alice: Api):
    alice.clock.now += 12 * 3600 - 1
    await alice.save(await alice.run(await alice.session()), "late")
    alice.clock.now += 1
    assert await events(alice) == []
    assert await events(alice, day=DAY) == ["apikey_created", "checkpoint_created"]
    assert await events(alice, day="2023-11-14") == []
    assert await events(alice, day="9999-12-31") == []


@pytest.mark.parametrize("wrong", [{"event_type": "everything"}, {"day": "today"}])
async def test_a_filter_that_is_none_is_refused(alice: Api, wrong: dict[str, str]):
    answer = await alice.get("audit", 400, **wrong)
    assert next(iter(wrong)) in answer["detail"]


async def test_who_reads_a_public_checkpoint_is_told_of_it_and_its_owner_is_not(
    alice: Api, bob: Api
):
    path = await alice.save(
        await alice.run(await alice.session()), "one", "save_weights_for_sampler"
    )
    await alice.send("POST", f"{url(path)}/publish")
    assert (await bob.http.get(f"{url(path)}/archive")).status_code == 302
    read = (await bob.get("audit"))["entries"][-1]
    assert (read["event"], read["purpose"], read["tinker_path"]) == (
        "checkpoint_read",
        "archive",
        path,
    )
    assert read["event_details"]["actor"] == "tml:organization_user:bob"
    assert "bob" not in str(await alice.get("audit"))


async def test_nobody_reads_of_another_tenant(alice: Api, bob: Api):
    await alice.save(await alice.run(await alice.session()), "one")
    assert await events(bob) == ["apikey_created"]
