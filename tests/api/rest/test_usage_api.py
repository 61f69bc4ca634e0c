"""Billing calls answer from the ledger: what was computed, once, to whom it belongs."""

from __future__ import annotations

from typing import Any

import pytest

from tests.api.rest.service import MODEL, Api

HOUR = {"starting_on": "2023-11-15T12:00:00Z", "ending_before": "2023-11-15T13:00:00Z"}


async def infos(api: Api, **window: str) -> list[dict[str, Any]]:
    answer = await api.get("billing/usage/events", **(HOUR | window))
    return [event["event_info"] for event in answer["data"]]


async def test_a_pass_counts_its_tokens_with_a_gradient_and_without(alice: Api):
    run = await alice.run(await alice.session())
    await alice.train(run, 7)
    await alice.train(run, 5, "forward")
    assert await infos(alice) == [{"type": "training", "token_count": 12}]


async def test_a_prompt_counts_once_and_each_sequence_by_itself(alice: Api):
    sampler = await alice.sampler(await alice.session())
    await alice.sample(sampler, prompt=9, max_tokens=4, num_samples=3)
    assert await infos(alice) == [
        {"type": "sampling_sample", "token_count": 12},
        {"type": "sampling_prefill", "cached": False, "token_count": 9},
    ]


async def test_a_submission_sent_again_is_counted_once(alice: Api):
    run = await alice.run(await alice.session())
    body = alice.pass_body(run, 7)
    for _ in range(3):
        await alice.outcome(await alice.post("forward_backward", body))
    assert await infos(alice) == [{"type": "training", "token_count": 7}]


async def test_what_failed_costs_nothing(alice: Api):
    run = await alice.run(await alice.session())
    body = alice.pass_body(run, 7)
    body["forward_backward_input"]["data"][0]["model_input"]["chunks"][0]["tokens"][0] = 13
    assert "error" in (await alice.outcome(await alice.post("forward_backward", body))).json()
    assert await infos(alice) == []


async def test_named_checkpoints_are_counted_and_unnamed_samplers_are_not(alice: Api):
    run = await alice.run(await alice.session())
    await alice.save(run, "one")
    await alice.save(run, "two", "save_weights_for_sampler")
    unnamed = alice.numbered(run, sampling_session_seq_id=0)
    await alice.outcome(await alice.post("save_weights_for_sampler", unnamed))
    assert await infos(alice) == [{"type": "checkpoint", "count": 2}]


async def test_events_say_when_for_which_model_session_project_and_user(alice: Api):
    session = await alice.session(user_metadata={"team": "red"}, project_id="one")
    await alice.train(await alice.run(session), 3)
    await alice.send("PUT", f"sessions/{session}/project", {"project_id": "two"})
    answer = await alice.get("billing/usage/events", **HOUR)
    assert answer["data"] == [
        {
            "bucket_start": "2023-11-15T12:00:00Z",
            "bucket_end": "2023-11-15T13:00:00Z",
            "base_model": MODEL,
            "session_id": session,
            "project_id": "two",
            "user_id": "tml:organization_user:alice",
            "user_name": "alice",
            "event_info": {"type": "training", "token_count": 3},
        }
    ]
    assert answer["sessions"] == {session: {"user_metadata": {"team": "red"}}}


async def test_each_hour_is_a_bucket_of_its_own(alice: Api):
    run = await alice.run(await alice.session())
    await alice.train(run, 3)
    alice.clock.now += 3600
    await alice.train(run, 4)
    assert await infos(alice) == [{"type": "training", "token_count": 3}]
    both = await infos(alice, ending_before="2023-11-15T14:00:00Z")
    assert [info["token_count"] for info in both] == [3, 4]


async def test_nobody_sees_what_another_tenant_used(alice: Api, bob: Api):
    session = await alice.session()
    await alice.save(await alice.run(session), "one")
    assert await infos(bob) == []
    assert (await bob.get("billing/usage/checkpoints/current"))["data"] == []


@pytest.mark.parametrize(
    ("window", "words"),
    [
        ({"starting_on": "yesterday"}, "starting_on is 'yesterday'"),
        ({"starting_on": "2023-11-15T12:00:00"}, "time zone"),
        ({"starting_on": "2023-11-15T12:30:00Z"}, "starting_on is not at a full hour"),
        ({"ending_before": "2023-11-15T12:00:00Z"}, "0 hours after"),
        ({"ending_before": "2023-12-15T12:00:00Z"}, "720 hours after starting_on"),
    ],
)
async def test_a_window_that_cannot_be_is_refused(alice: Api, window: dict[str, str], words: str):
    answer = await alice.get("billing/usage/events", 400, **(HOUR | window))
    assert words in answer["detail"]


async def test_stored_checkpoints_are_told_by_project_until_they_expire(alice: Api):
    first, second = await alice.session(), await alice.session(project_id="other")
    await alice.save(await alice.run(first), "one", ttl_seconds=3600)
    await alice.save(await alice.run(second), "one")
    stored = (await alice.get("billing/usage/checkpoints/current"))["data"]
    assert [(row["project_id"], row["checkpoint_count"]) for row in stored] == [
        ("default", 1),
        ("other", 1),
    ]
    assert stored[0]["size_bytes"] > 0
    assert stored[0]["size_gigabytes"] == stored[0]["size_bytes"] / 1e9
    alice.clock.now += 3600
    stored = (await alice.get("billing/usage/checkpoints/current"))["data"]
    assert [row["project_id"] for row in stored] == ["other"]
    only = await alice.get("billing/usage/checkpoints/current", project_id="default")
    assert only["data"] == []
