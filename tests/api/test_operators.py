"""What only the operator may ask."""

from __future__ import annotations

import httpx2
import pytest
from fastapi import FastAPI

from tests.api.client import Client
from tests.fake_backend import FakeBackend


@pytest.fixture
def operator(app: FastAPI, client: Client) -> httpx2.AsyncClient:
    """Speaks to the service that `client` brought up."""
    return httpx2.AsyncClient(
        transport=httpx2.ASGITransport(app),
        base_url="http://hearth/operator",
        headers={"authorization": f"Bearer {app.state.rooms.operator_token}"},
    )


async def test_memory_is_told_by_run(
    client: Client, operator: httpx2.AsyncClient, backend: FakeBackend
):
    run = await client.run()
    answer = (await operator.get("memory")).json()
    expected = (await backend.memory()).runs[run]
    assert answer["trainer-0"]["runs"][run]["weights"] == expected.weights > 0


@pytest.mark.parametrize("token", ["", "Bearer ", "Bearer guess", "Bearer \u00e9"])
async def test_nobody_else_is_answered(client: Client, operator: httpx2.AsyncClient, token: str):
    answer = await operator.get("memory", headers={"authorization": token.encode()})
    assert answer.status_code == 401
