"""Keys and the tokens they are exchanged for: who is let in, as whom, and for how long."""

from __future__ import annotations

import jwt
import pytest

from tests.api.rest.service import Api


async def token_of(api: Api) -> Api:
    """The same caller, with a token in place of the key."""
    return Api(api.app, api.clock, (await api.post("auth/token", {}))["jwt"])


async def test_a_token_tells_whose_it_is_and_until_when(alice: Api):
    token = await token_of(alice)
    claims = jwt.decode(token.key or "", options={"verify_signature": False})
    assert claims["sub"] == "tml:organization_user:alice"
    assert claims["org_id"] == "alice"
    assert claims["email"] == "alice@hearth.local"
    assert claims["iat"] == alice.clock.now < claims["exp"]


async def test_a_token_opens_what_its_key_opens(alice: Api, bob: Api):
    session = await alice.session()
    await (await token_of(alice)).get(f"sessions/{session}")
    await (await token_of(bob)).get(f"sessions/{session}", 404)


@pytest.mark.parametrize("how", ["expired", "forged", "garbled", "revoked"])
async def test_a_token_that_is_no_good_asks_for_another(alice: Api, how: str):
    token = await token_of(alice)
    match how:
        case "expired":
            alice.clock.now += 24 * 3600
        case "forged":
            claims = jwt.decode(token.key or "", options={"verify_signature": False})
            forged = jwt.encode(claims, "not the secret of this server, 32 b", "HS256")
            token = Api(alice.app, alice.clock, forged)
        case "garbled":
            token = Api(alice.app, alice.clock, "eyJ.no.token")
        case "revoked":
            await alice.send("DELETE", "auth/apikey/me")
    answer = await token.http.get("sessions")
    assert answer.status_code == 401
    assert answer.headers["www-authenticate"] == 'Bearer error="invalid_token"'


async def test_an_unsigned_token_is_no_token(alice: Api):
    claims = jwt.decode((await token_of(alice)).key or "", options={"verify_signature": False})
    await Api(alice.app, alice.clock, jwt.encode(claims, None, "none")).get("sessions", 401)


async def test_a_key_that_is_no_good_is_the_end_of_it(alice: Api):
    answer = await Api(alice.app, alice.clock, "tml-wrong").http.get("sessions")
    assert answer.status_code == 401
    assert "www-authenticate" not in answer.headers
    await Api(alice.app, alice.clock, "tml-wrong").post("auth/token", {}, 401)


async def test_a_token_gets_no_longer_life_out_of_itself(alice: Api):
    token = await token_of(alice)
    alice.clock.now += 3600
    assert (await token_of(token)).key == token.key


async def test_a_key_learns_its_name_and_can_end_itself_alone(alice: Api, bob: Api):
    answer = await alice.get("auth/apikey/me")
    assert isinstance(answer["key_id"], int)
    assert answer["key_id"] != (await bob.get("auth/apikey/me"))["key_id"]
    del answer["key_id"]
    assert answer == {
        "name": "alice",
        "note": "",
        "details": {
            "org_details": {"name": "alice"},
            "user_details": {"email": "alice@hearth.local"},
        },
    }
    await alice.send("DELETE", "auth/apikey/me")
    await alice.get("auth/apikey/me", 401)
    await bob.get("auth/apikey/me")


async def test_a_server_without_keys_knows_everybody_as_one(local: Api):
    token = await token_of(local)
    assert (await token.get("auth/apikey/me"))["name"] == "local"
    await token.get("sessions")
    assert "no API key" in (await local.send("DELETE", "auth/apikey/me", status=400))["detail"]


async def test_the_first_key_ends_the_trust_even_when_made_beside_the_server(local: Api):
    token = await token_of(local)
    await local.get("sessions")
    # As `hearth keys create` does, in a process of its own.
    await local.app.state.rooms.keys.create("alice", "alice", "default")
    local.app.state.rooms.keys.required = False
    local.clock.now += 2
    await local.get("sessions", 401)
    await token.get("sessions", 401)


@pytest.mark.parametrize(
    ("version", "enabled"),
    [("0.38.0", True), ("0.30.4", True), ("1.0", True), ("0.25.0", False), ("dev", False)],
)
async def test_sdks_that_know_whoami_are_told_to_use_tokens(
    local: Api, version: str, enabled: bool
):
    flags = await local.post("client/config", {"sdk_version": version})
    assert flags["pjwt_auth_enabled"] is enabled


async def test_old_sdks_that_send_no_body_get_their_flags(local: Api):
    answer = await local.http.post("client/config")
    assert answer.json()["pjwt_auth_enabled"] is False
