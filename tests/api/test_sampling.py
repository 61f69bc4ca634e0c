"""Sampling over HTTP."""

from __future__ import annotations

import asyncio

import pytest

from server.housekeeping import Housekeeping
from tests import bodies
from tests.api.client import Client
from tests.databases import Clock
from tests.fake_backend import BUG_TOKEN, DEADLY_TOKEN, FakeBackend


async def sampled(client: Client, sampler: str, seq: int, prompt: list[int]) -> dict | None:
    """None for a good sample, else what the client is told."""
    response = await client.result(
        await client.answer("asample", **bodies.sample(sampler, seq, prompt))
    )
    assert response.status_code == 200
    protobuf = response.headers["content-type"] == "application/x-protobuf"
    return None if protobuf else response.json()


async def test_a_sample_is_promised_then_kept(client: Client, backend: FakeBackend):
    sampler = await client.sampler(await client.session())
    promise = await client.answer("asample", **bodies.sample(sampler, 0, [1, 2]))
    assert promise == {
        "request_id": f"{sampler}:0",
        "sample_sequence_ids": [f"{sampler}:0:0"],
    }
    assert (await client.result(promise)).headers["content-type"] == "application/x-protobuf"
    assert backend.sampled[0].adapter is None


async def test_a_resent_sample_is_generated_once(client: Client, backend: FakeBackend):
    sampler = await client.sampler(await client.session())
    body = bodies.sample(sampler, 0, [1])
    first, second = await asyncio.gather(*(client.answer("asample", **body) for _ in range(2)))
    assert first == second
    await client.result(first)
    assert len(backend.sampled) == 1


async def test_creating_a_sampling_session_twice_is_one(client: Client):
    session = await client.session()
    assert await client.sampler(session) == await client.sampler(session)


async def test_every_copy_of_a_client_gets_its_own_number(client: Client):
    sampler = await client.sampler(await client.session())
    joins = [client.answer("join_sampling_session", sampling_session_id=sampler) for _ in range(5)]
    numbers = [answer["client_counter"] for answer in await asyncio.gather(*joins)]
    assert sorted(numbers) == [1, 2, 3, 4, 5]


async def test_a_sampler_on_a_checkpoint_samples_its_weights(client: Client, backend: FakeBackend):
    run = await client.run()
    path = await client.saved_for_sampler(run, 1, "name")
    sampler = await client.sampler(await client.session(), model_path=path)
    assert await sampled(client, sampler, 0, [1]) is None
    assert backend.sampled[0].adapter is not None
    answer = (await client.get(f"samplers/{sampler}")).json()
    assert answer == {"sampler_id": sampler, "base_model": "tiny/fake", "model_path": path}


async def test_deleted_weights_are_said_to_be_deleted(client: Client, clock: Clock):
    run = await client.run()
    path = await client.saved_for_sampler(run, 1, "name")
    sampler = await client.sampler(await client.session(), model_path=path)
    deleted = await client.delete(f"training_runs/{run}/checkpoints/sampler_weights/name")
    assert deleted.status_code == 200
    clock.now += 61
    await Housekeeping(client.rooms).sweep()

    response = await client.ask("asample", **bodies.sample(sampler, 0, [1]))
    assert response.status_code == 404
    assert path in response.json()["detail"]


async def test_weights_are_not_taken_from_under_a_running_sample(
    client: Client, clock: Clock, backend: FakeBackend
):
    run = await client.run()
    path = await client.saved_for_sampler(run, 1, "name")
    sampler = await client.sampler(await client.session(), model_path=path)
    backend.hold()
    promise = await client.answer("asample", **bodies.sample(sampler, 0, [1]))
    await client.delete(f"training_runs/{run}/checkpoints/sampler_weights/name")
    clock.now += 61
    await Housekeeping(client.rooms).sweep()
    backend.let_go()

    response = await client.result(promise)
    assert response.headers["content-type"] == "application/x-protobuf"
    storage = client.rooms.checkpoints.storage
    await Housekeeping(client.rooms).sweep()
    assert not [entry for entry in storage.root.iterdir() if entry.is_dir()]


async def test_inflight_weights_are_the_newest_and_old_ones_go(
    client: Client, clock: Clock, backend: FakeBackend
):
    run = await client.run()
    samplers = []
    for number in range(3):
        done = await client.done(
            "save_weights_for_sampler",
            model_id=run,
            seq_id=number + 1,
            sampling_session_seq_id=number,
            kind="inflight",
        )
        samplers.append(done["sampling_session_id"])
        assert await sampled(client, samplers[0], number, [1]) is None
    assert len({sample.adapter for sample in backend.sampled}) == 3
    assert {sample.cache_namespace for sample in backend.sampled} == {samplers[0]}

    clock.now += 61
    await Housekeeping(client.rooms).sweep()
    kept = [entry.name for entry in client.rooms.checkpoints.storage.root.iterdir()]
    assert kept == [client.rooms.runs.registry.known(run).run.inflight_folder]
    assert await sampled(client, samplers[0], 9, [1]) is None


async def test_a_sample_survives_the_loss_of_its_engine(client: Client, backend: FakeBackend):
    sampler = await client.sampler(await client.session())
    backend.die_in["sample"] = 0
    assert await sampled(client, sampler, 0, [1]) is None


async def test_a_sample_that_kills_every_engine_fails_alone(client: Client):
    sampler = await client.sampler(await client.session())
    told = await sampled(client, sampler, 0, [DEADLY_TOKEN])
    assert told is not None
    assert told["category"] == "server"
    assert await sampled(client, sampler, 1, [1]) is None


async def test_a_sample_that_meets_a_bug_fails_and_is_not_left_hanging(client: Client):
    sampler = await client.sampler(await client.session())
    async with asyncio.timeout(5):
        told = await sampled(client, sampler, 0, [BUG_TOKEN])
    assert told == {
        "error": "sampling failed: ZeroDivisionError: a bug of the engine",
        "category": "server",
    }


async def test_cancelling_is_never_an_error(client: Client, backend: FakeBackend):
    sampler = await client.sampler(await client.session())
    backend.hold()
    promise = await client.answer("asample", **bodies.sample(sampler, 0, [1]))
    assert await client.answer("cancel_future", request_id=promise["request_id"]) == {}
    backend.let_go()
    told = (await client.result(promise)).json()
    assert "cancelled" in told["error"]
    assert told["category"] == "user"
    assert await client.answer("cancel_future", request_id=promise["request_id"]) == {}


async def test_a_cancel_between_the_turn_and_the_engine_is_heeded(
    client: Client, backend: FakeBackend, monkeypatch: pytest.MonkeyPatch
):
    sampler = await client.sampler(await client.session())
    client.rooms.hold(True)
    promise = await client.answer("asample", **bodies.sample(sampler, 0, [1]))
    ledger = client.rooms.ledger
    retrieve = ledger.retrieve

    async def then_let_in(*arguments, **options):
        found = await retrieve(*arguments, **options)
        client.rooms.hold(False)
        return found

    monkeypatch.setattr(ledger, "retrieve", then_let_in)
    await client.answer("cancel_future", request_id=promise["request_id"])
    monkeypatch.undo()
    told = (await client.result(promise)).json()
    assert told == {"error": "cancelled by the client", "category": "user"}
    assert backend.sampled == []


async def test_samples_are_followed_by_a_cursor(client: Client):
    sampler = await client.sampler(await client.session())
    target = {"type": "sampling_session", "sampling_session_id": sampler, "cloned_sampler_id": 0}
    assert await client.answer("retrieve_futures", target=target, timeout=0) == {
        "completions": [],
        "cursor": 0,
    }
    await sampled(client, sampler, 0, [1])
    await sampled(client, sampler, 1, [BUG_TOKEN])
    answer = await client.answer("retrieve_futures", target=target, prev_cursor=0)
    assert [one["state"] for one in answer["completions"]] == ["finished", "failed"]
    assert answer["completions"][0]["response_payload_uncompressed_size"] > 0

    later = await client.answer(
        "retrieve_futures", target=target, prev_cursor=answer["cursor"], timeout=0
    )
    assert later == {"completions": [], "cursor": answer["cursor"]}


@pytest.mark.parametrize("kind", ["weights", "external_weights"])
async def test_only_sampler_checkpoints_are_sampled(client: Client, kind: str):
    response = await client.ask(
        "create_sampling_session",
        session_id=await client.session(),
        sampling_session_seq_id=0,
        model_path=f"tinker://run/{kind}/name",
    )
    assert response.status_code == 400
    assert "save_weights_for_sampler" in response.json()["detail"]
