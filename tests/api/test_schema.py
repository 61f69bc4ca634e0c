"""The OpenAPI schema tells every body, and whatever fits it, or nearly, gets a good answer."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.api.client import Client
from tests.api.described import bounded, call, cases, documents, naming, operations, sentence

DOCUMENTS = documents()
OPERATIONS = operations(DOCUMENTS[0])
WITHOUT_BODY = {
    "POST /api/v1/client/dynamic_config",
    "POST /api/v1/telemetry",
    "POST /api/v1/auth/token",
    "POST /api/v1/training_runs/{run_id}/checkpoints/{kind}/{name}/publish",
}


@pytest.fixture
async def names(client: Client) -> dict[str, str]:
    """What exists, by the names that routes and bodies have for it."""
    session = await client.session()
    run = await client.run(session)
    path = await client.saved(run, 1, "name")
    sampler = await client.sampler(session)
    return {
        "session_id": session,
        "run_id": run,
        "model_id": run,
        "kind": "weights",
        "name": "name",
        "tinker_path": path,
        "source_path": path,
        "base_model": "tiny/fake",
        "sampler_id": sampler,
        "sampling_session_id": sampler,
        "request_id": f"{run}:1",
    }


@pytest.mark.parametrize("document", DOCUMENTS, ids=["tinker", "openai"])
def test_every_body_is_described(document: dict[str, object]) -> None:
    silent = {
        name
        for name, operation in operations(document).items()
        if name.startswith(("POST", "PUT")) and not operation.body
    }
    assert silent <= WITHOUT_BODY
    assert "$defs" not in str(document)


def test_a_protobuf_body_is_told_as_binary() -> None:
    content = DOCUMENTS[0]["paths"]["/api/v1/forward_backward"]["post"]["requestBody"]["content"]
    assert content["application/x-protobuf"]["schema"] == {"type": "string", "format": "binary"}
    assert "forward_backward_input" in content["application/json"]["schema"]["properties"]


async def test_both_schemas_are_served(client: Client) -> None:
    for url, document in zip(("/openapi.json", "/oai/openapi.json"), DOCUMENTS, strict=True):
        served = (await client.get(f"http://hearth{url}")).json()
        assert served["paths"].keys() == document["paths"].keys()


@pytest.mark.parametrize("route", OPERATIONS)
@bounded
@given(draw=st.data())
async def test_whatever_the_schema_allows_or_nearly_is_answered(
    client: Client, names: dict[str, str], route: str, draw: st.DataObject
) -> None:
    case = draw.draw(cases(OPERATIONS[route]))
    if draw.draw(st.booleans()):
        case = naming(case, names)
    sentence(await call(client, case), "detail")
