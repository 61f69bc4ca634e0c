"""The caller's own API key, and the token it is exchanged for."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import APIRouter, Depends, Request

from server.api.rooms import InRooms, rooms_of
from server.tenancy.keys import Credential
from server.tenancy.tokens import email

router = APIRouter()


async def get_credential(request: Request) -> Credential:
    return await rooms_of(request).keys.identify(request.headers.get("x-api-key"))


Presented = Annotated[Credential, Depends(get_credential)]


@router.post("/auth/token")
async def token(request: Request, rooms: InRooms) -> dict[str, str]:
    return {"jwt": await rooms.keys.token(request.headers.get("x-api-key"))}


@router.get("/auth/apikey/me")
async def get_own_key(credential: Presented) -> dict[str, Any]:
    """What `tinker auth login` shows. An organization of the SDK is a tenant here."""
    tenant = credential.tenant
    return {
        "key_id": credential.key_id,
        "name": tenant.name,
        "note": "" if credential.digest else "this server asks for no API key",
        "details": {
            "org_details": {"name": tenant.id},
            "user_details": {"email": email(tenant)},
        },
    }


@router.delete("/auth/apikey/me")
async def delete_own_key(rooms: InRooms, credential: Presented) -> dict[str, Any]:
    await rooms.keys.revoke_own(credential)
    return {}
