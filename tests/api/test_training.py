"""Training over HTTP: promised, kept, and promised once."""

from __future__ import annotations

import asyncio

from tests import bodies
from tests.api.client import Client
from tests.fake_backend import FakeBackend


async def test_a_step_is_promised_then_kept(client: Client, backend: FakeBackend):
    run = await client.run()
    computed = await client.result(await client.train(run, 1, [1, 2, 3]))
    assert computed.headers["content-type"] == "application/x-protobuf"
    stepped = await client.done("optim_step", **bodies.optim_step(run, 2))
    assert stepped["metrics"]["steps"] == 1
    assert backend.runs[run].steps == 1


async def test_a_resent_submission_gets_the_same_promise_and_runs_once(
    client: Client, backend: FakeBackend
):
    run = await client.run()
    promises = await asyncio.gather(*(client.train(run, 1, [5]) for _ in range(5)))
    assert len({promise["request_id"] for promise in promises}) == 1
    await client.result(promises[0])
    assert (await client.train(run, 1, [5])) == promises[0]
    assert backend.runs[run].gradient == 5


async def test_creating_a_run_twice_is_one_run(client: Client, backend: FakeBackend):
    session = await client.session()
    body = {"session_id": session, "model_seq_id": 0, "base_model": "tiny/fake"}
    promises = await asyncio.gather(*(client.answer("create_model", **body) for _ in range(4)))
    assert {promise["model_id"] for promise in promises} == {f"{session}:train:0"}
    await client.result(promises[0])
    assert backend.calls.count("create") == 1


async def test_what_a_run_is(client: Client):
    run = await client.run(rank=8)
    info = await client.answer("get_info", model_id=run)
    assert info["lora_rank"] == 8
    assert info["model_data"]["tokenizer_id"].endswith("models/fake")


async def test_a_run_is_made_from_a_checkpoint_with_its_shape(client: Client, backend: FakeBackend):
    first = await client.run(rank=8)
    await client.train(first, 1, [3])
    await client.done("optim_step", **bodies.optim_step(first, 2))
    path = await client.saved(first, 3, "good", user_metadata={"epoch": "1"})
    promise = await client.answer(
        "load_weights",
        session_id=await client.session(),
        model_seq_id=0,
        path=path,
        optimizer=True,
    )
    assert (await client.result(promise)).json()["path"] == path
    second = promise["model_id"]
    assert backend.runs[second].weight == backend.runs[first].weight
    assert (await client.answer("get_info", model_id=second))["lora_rank"] == 8


async def test_a_checkpoint_of_another_shape_is_not_loaded(client: Client):
    path = await client.saved(await client.run(rank=8), 1, "good")
    other = await client.run(rank=4)
    refused = await client.done("load_weights", model_id=other, seq_id=1, path=path)
    assert refused["category"] == "user"
    assert "rank 8" in refused["error"]


async def test_a_name_is_given_once_unless_it_is_to_be_replaced(client: Client):
    run = await client.run()
    path = await client.saved(run, 1, "name")
    again = await client.done("save_weights", model_id=run, seq_id=2, path="name")
    assert "exists already" in again["error"]
    assert await client.saved(run, 3, "name", overwrite=True) == path


async def test_only_a_training_checkpoint_can_be_loaded(client: Client):
    run = await client.run()
    path = await client.saved_for_sampler(run, 1, "name")
    response = await client.ask("load_weights", model_id=run, seq_id=2, path=path)
    assert response.status_code == 400
    assert "sampler_weights" in response.json()["detail"]


async def test_a_run_of_a_model_that_is_gone_is_refused_and_not_lost(client: Client):
    run = await client.run()
    served = client.rooms.catalogue._models.pop("tiny/fake")
    for route, body in (
        ("forward_backward", bodies.forward_backward(run, 1, [1])),
        ("optim_step", bodies.optim_step(run, 1)),
    ):
        response = await client.ask(route, **body)
        assert response.status_code == 400
        assert "not served here" in response.json()["detail"]
    client.rooms.catalogue.add(served)
    assert (await client.result(await client.train(run, 1, [1]))).status_code == 200
