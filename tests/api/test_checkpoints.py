"""Checkpoints and runs over REST: list, publish, expire, delete, copy, download."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from typing import Any

import pytest
import pytest_asyncio
from sqlalchemy import event

from server.housekeeping import Housekeeping
from tests.api.client import Client
from tests.databases import Clock


@pytest_asyncio.fixture
async def tenants(client: Client) -> AsyncGenerator[tuple[Client, Client]]:
    """Two who know nothing of each other."""
    keys = [await client.rooms.keys.create(name, name, "default") for name in ("ann", "bob")]
    async with (
        Client(client.app, **{"x-api-key": keys[0]}) as ann,
        Client(client.app, **{"x-api-key": keys[1]}) as bob,
    ):
        yield ann, bob


def one(run: str, kind: str = "weights", name: str = "name") -> str:
    return f"training_runs/{run}/checkpoints/{kind}/{name}"


async def test_a_checkpoint_is_told_of_as_the_sdk_reads_it(client: Client):
    run = await client.run()
    path = await client.saved(run, 1, "name", ttl_seconds=7200, user_metadata={"a": "b"})
    listed = (await client.get(f"training_runs/{run}/checkpoints")).json()["checkpoints"]
    [checkpoint] = listed
    assert checkpoint.pop("size_bytes") > 0
    assert checkpoint == {
        "checkpoint_id": "weights/name",
        "checkpoint_type": "training",
        "time": "1970-01-12T13:46:40Z",
        "tinker_path": path,
        "public": False,
        "user_metadata": {"a": "b"},
        "expires_at": "1970-01-12T15:46:40Z",
    }


async def test_checkpoints_are_listed_newest_first_in_pages(client: Client, clock: Clock):
    run, paths = await client.run(), []
    for seq in range(1, 6):
        clock.now += 1
        paths.append(await client.saved(run, seq, f"name-{seq}"))
    found = []
    for offset in (0, 2, 4):
        page = (await client.get("checkpoints", params={"limit": 2, "offset": offset})).json()
        assert page["cursor"] == {"offset": offset, "limit": 2, "total_count": 5}
        found += [checkpoint["tinker_path"] for checkpoint in page["checkpoints"]]
    assert found == paths[::-1]


async def test_a_run_tells_its_newest_checkpoint_of_each_kind(client: Client, clock: Clock):
    run = await client.run()
    await client.saved(run, 1, "old")
    clock.now += 1
    newest = await client.saved(run, 2, "new")
    for_sampler = await client.saved_for_sampler(run, 3, "name")
    await client.run()

    answer = (await client.get(f"training_runs/{run}")).json()
    assert answer["last_checkpoint"]["tinker_path"] == newest
    assert answer["last_sampler_checkpoint"]["tinker_path"] == for_sampler
    listed = (await client.get("training_runs")).json()
    assert listed["cursor"]["total_count"] == 2
    assert answer in listed["training_runs"]
    assert [run for run in listed["training_runs"] if "last_checkpoint" not in run]


async def test_a_page_of_runs_costs_the_same_few_queries_however_long(client: Client):
    session = await client.session()
    counts = []
    for number in range(6):
        run = await client.run(session, number)
        await client.saved(run, 1, "name")
        statements: list[str] = []

        def count(_: Any, __: Any, statement: str, *___: Any, to: Any = statements) -> None:
            to.append(statement)

        engine = client.rooms.ledger.db.engine.sync_engine
        event.listen(engine, "before_cursor_execute", count)
        listed = (await client.get("training_runs")).json()["training_runs"]
        event.remove(engine, "before_cursor_execute", count)
        assert len(listed) == number + 1
        counts.append(len([s for s in statements if s.startswith("SELECT")]))
    assert counts[-1] == counts[0]


async def test_runs_of_one_project_can_be_listed_alone(client: Client):
    run = await client.run(await client.session(project_id="mine"))
    await client.run()
    listed = (await client.get("training_runs", params={"project_id": "mine"})).json()
    assert [one["training_run_id"] for one in listed["training_runs"]] == [run]


async def test_a_published_checkpoint_is_read_by_others_until_it_is_not(
    tenants: tuple[Client, Client],
):
    ann, bob = tenants
    run = await ann.run()
    path = await ann.saved(run, 1, "name")
    assert (await bob.ask("weights_info", tinker_path=path)).status_code == 404

    for _ in range(2):
        assert (await ann.post(f"{one(run)}/publish")).status_code == 200
    info = await bob.answer("weights_info", tinker_path=path)
    assert (info["base_model"], info["lora_rank"], info["is_lora"]) == ("tiny/fake", 4, True)
    assert (await bob.delete(one(run))).status_code == 404
    assert (await bob.post(f"{one(run)}/publish")).status_code == 404

    assert (await ann.delete(f"{one(run)}/publish")).status_code == 200
    assert (await bob.ask("weights_info", tinker_path=path)).status_code == 404


async def test_everything_of_another_tenant_looks_like_nothing(tenants: tuple[Client, Client]):
    ann, bob = tenants
    session = await ann.session()
    run, sampler = await ann.run(session), await ann.sampler(session)
    path = await ann.saved(run, 1, "name")
    promise = await ann.train(run, 2, [1])
    for response in [
        await bob.get(f"training_runs/{run}"),
        await bob.get(f"training_runs/{run}/checkpoints"),
        await bob.get(f"sessions/{session}"),
        await bob.get(f"samplers/{sampler}"),
        await bob.ask("get_info", model_id=run),
        await bob.ask("retrieve_future", request_id=promise["request_id"]),
        await bob.ask("cancel_future", request_id=promise["request_id"]),
        await bob.ask("join_sampling_session", sampling_session_id=sampler),
        await bob.ask(f"sessions/{session}/finish"),
        await bob.put(f"sessions/{session}/project", json={"project_id": "x"}),
        await bob.put(f"{one(run)}/ttl", json={"ttl_seconds": None}),
        await bob.get(f"{one(run)}/external_weights_urls"),
        await bob.ask("copy_weights", source_path=path, destination_project_id="x"),
        await bob.ask("retrieve_futures", target={"sampling_session_id": sampler}),
    ]:
        assert response.status_code == 404, response.url
        assert "does not exist" in response.json()["detail"]
    for route in ("training_runs", "sessions", "checkpoints"):
        listed = (await bob.get(route)).json()
        assert listed[route] == []


async def test_a_lifetime_can_be_set_and_taken_away(client: Client, clock: Clock):
    run = await client.run()
    await client.saved(run, 1, "name", ttl_seconds=3600)
    assert (await client.put(f"{one(run)}/ttl", json={"ttl_seconds": None})).status_code == 200
    clock.now += 10_000
    await Housekeeping(client.rooms).sweep()
    assert len((await client.get("checkpoints")).json()["checkpoints"]) == 1

    for wrong in (1, -5, 10**12):
        response = await client.put(f"{one(run)}/ttl", json={"ttl_seconds": wrong})
        assert response.status_code == 400
    await client.put(f"{one(run)}/ttl", json={"ttl_seconds": 3600})
    clock.now += 3600
    assert (await client.get("checkpoints")).json()["checkpoints"] == []
    path = f"tinker://{run}/weights/name"
    assert (await client.ask("weights_info", tinker_path=path)).status_code == 404
    await Housekeeping(client.rooms).sweep()
    clock.now += 61
    await Housekeeping(client.rooms).sweep()
    assert list(client.rooms.checkpoints.storage.root.iterdir()) == []


async def test_a_longer_life_given_at_the_last_moment_counts(client: Client, clock: Clock):
    run = await client.run()
    await client.saved(run, 1, "name", ttl_seconds=3600)
    clock.now += 3600
    checkpoints = client.rooms.checkpoints
    from server.checkpoints import queries

    [expired] = await checkpoints._db.read(lambda db: queries.expired(db, clock()))
    await checkpoints._db.write(
        lambda db: queries.change(db, expired.path, expires_at=clock() + 100)
    )
    assert not await checkpoints._remove(expired, expired_by=clock())
    assert len((await client.get("checkpoints")).json()["checkpoints"]) == 1


async def test_a_deleted_checkpoint_is_gone_and_so_is_its_folder_a_while_later(
    client: Client, clock: Clock
):
    run = await client.run()
    path = await client.saved(run, 1, "name")
    assert (await client.delete(one(run))).status_code == 200
    assert (await client.delete(one(run))).status_code == 404
    assert (await client.ask("weights_info", tinker_path=path)).status_code == 404
    clock.now += 61
    await Housekeeping(client.rooms).sweep()
    assert list(client.rooms.checkpoints.storage.root.iterdir()) == []


async def test_a_copy_is_its_owners_own_and_outlives_the_original(
    tenants: tuple[Client, Client], clock: Clock
):
    ann, bob = tenants
    run = await ann.run()
    path = await ann.saved(run, 1, "name")
    await ann.post(f"{one(run)}/publish")
    copied = (await bob.answer("copy_weights", source_path=path, destination_project_id="bobs"))[
        "tinker_path"
    ]
    assert copied.endswith("/weights/name")
    await ann.delete(one(run))
    clock.now += 61
    await Housekeeping(ann.rooms).sweep()

    promise = await bob.answer(
        "load_weights", session_id=await bob.session(), model_seq_id=0, path=copied
    )
    assert "error" not in (await bob.result(promise)).json()
    holder = copied.split("/")[2]
    response = await bob.ask("optim_step", model_id=holder, seq_id=1)
    assert response.status_code == 400
    assert "cannot be trained" in response.json()["detail"]


async def test_copying_again_with_the_same_key_is_the_same_copy(client: Client):
    run = await client.run()
    path = await client.saved(run, 1, "name")
    body = {"source_path": path, "destination_project_id": "other"}
    headers = {"x-idempotency-key": "once"}
    copies = [
        (await client.post("copy_weights", json=body, headers=headers)).json() for _ in range(2)
    ]
    assert copies[0] == copies[1]
    assert (await client.answer("copy_weights", **body)) != copies[0]
    assert len(list(client.rooms.checkpoints.storage.root.iterdir())) == 3


async def test_a_lifetime_of_a_copy_has_limits_too(client: Client):
    run = await client.run()
    path = await client.saved(run, 1, "name")
    for seconds in (-1, 10**400):
        response = await client.post(
            "copy_weights",
            content=b'{"source_path": "%s", "destination_project_id": "x", "ttl_seconds": %d}'
            % (path.encode(), seconds),
        )
        assert response.status_code == 400


async def test_files_are_downloaded_by_signed_url_without_a_key(
    tenants: tuple[Client, Client], client: Client, clock: Clock
):
    ann, _ = tenants
    run = await ann.run()
    await ann.done("save_weights_external", model_id=run, seq_id=1, path="name")
    answer = (await ann.get(f"{one(run, 'external_weights')}/external_weights_urls")).json()
    [(name, url)] = answer["urls"].items()
    assert name == "adapter_model.safetensors"
    assert answer["expires"].endswith("Z")

    response = await client.get(url)
    assert response.status_code == 200
    assert int(response.headers["content-length"]) == len(response.content) > 0
    for broken in (
        url.replace("signature=", "signature=0"),
        url.replace("expires=", "expires=9"),
        url.replace(name, "other"),
        url.replace(name, "..%2f..%2fdownload.key"),
        url.replace("signature=", "signature=%C3%A4"),
    ):
        assert (await client.get(broken)).status_code == 404, broken
    clock.now += 3601
    assert (await client.get(url)).status_code == 404


@pytest.mark.parametrize(
    "path", ["training_runs/x/checkpoints/weights/..", "training_runs/x/checkpoints/odd/name"]
)
async def test_a_wrong_name_or_kind_in_a_url_is_refused(client: Client, path: str):
    assert (await client.delete(path)).status_code in {400, 404, 405}
