"""Whatever a client sends as protobuf, it is answered, and its run can still be trained."""

from __future__ import annotations

import asyncio
import itertools
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given
from hypothesis import settings as examples
from hypothesis import strategies as st

from server.settings import Settings
from tests.api.client import Client
from tests.api.protobuf_mutations import messages, mutated

PROTOBUF = {"content-type": "application/x-protobuf"}
ANSWER_S = 5.0


@pytest.fixture
def settings(data: Path) -> Settings:
    """Numbers that never come are not waited for."""
    models = {"tiny/fake": Path("/models/fake")}
    return Settings(
        data=data, models=models, long_poll_s=0.05, max_body_bytes=2**20, gap_wait_s=0.0
    )


async def still_trains(client: Client, run: str, taken: set[str]) -> None:
    seq = next(n for n in itertools.count(50) if f"{run}:{n}" not in taken)
    promise = await client.train(run, seq, [1, 2, 3])
    taken.add(promise["request_id"])
    result = await asyncio.wait_for(client.result(promise), ANSWER_S)
    assert result.status_code == 200
    assert "error" not in result.text[:20]


@examples(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(draw=st.data())
async def test_no_protobuf_makes_the_server_fail(client: Client, draw: st.DataObject) -> None:
    run = await client.run()
    taken: set[str] = set()
    body = draw.draw(messages(run)).SerializeToString()
    for content in draw.draw(st.lists(mutated(body), min_size=8, max_size=8)):
        sending = client.post("forward_backward", content=content, headers=PROTOBUF)
        response = await asyncio.wait_for(sending, ANSWER_S)
        assert response.status_code in (200, 400, 404, 413), (response.text, content)
        if response.status_code != 200:
            assert 0 < len(response.json()["detail"]) < 1000
            continue
        taken.add(response.json()["request_id"])
        done = await asyncio.wait_for(client.result(response.json()), ANSWER_S)
        assert done.status_code == 200, (done.text, content)
    await still_trains(client, run, taken)


@examples(
    max_examples=10, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(draw=st.data())
async def test_what_the_fuzzer_starts_from_is_taken(client: Client, draw: st.DataObject) -> None:
    run = await client.run()
    body = draw.draw(messages(run)).SerializeToString()
    response = await client.post("forward_backward", content=body, headers=PROTOBUF)
    assert response.status_code == 200, response.text
