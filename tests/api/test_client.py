"""What a client asks first."""

from __future__ import annotations

from tests.api.client import Client


async def test_it_is_there(client: Client):
    response = await client.get("healthz")
    assert (response.status_code, response.json()) == (200, {"status": "ok"})


async def test_the_flags_of_the_sdk(client: Client):
    flags = await client.answer("client/config")
    assert flags["parallel_fwdbwd_chunks"] is False, "a missing number is one that never comes"
    assert flags["sample_max_concurrent_requests"] == 3, "no more than one tenant may have waiting"
    assert flags["create_model_via_load_weights"] is True
    assert flags["proto_write_fwdbwd"] is True


async def test_the_flags_that_change(client: Client):
    assert (await client.answer("client/dynamic_config"))["sample_cancel_enabled"] is True


async def test_what_is_served(client: Client):
    served = (await client.get("get_server_capabilities")).json()["supported_models"]
    assert served == [
        {
            "model_name": "tiny/fake",
            "max_context_length": 64,
            "trainable": True,
            "sampleable": True,
        }
    ]


async def test_telemetry_is_taken_whatever_it_is(client: Client):
    for content in (b"", b"{", b"x" * 2_000_000):
        response = await client.post("telemetry", content=content)
        assert response.json() == {"status": "accepted"}
