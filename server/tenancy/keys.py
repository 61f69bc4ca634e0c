"""API keys: who is calling."""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Callable

from server.core.errors import NotAuthenticated
from server.core.ids import TenantId
from server.core.records import Tenant
from server.store.database import Database
from server.tenancy import queries

LOCAL = Tenant(id=TenantId("local"))
"""Everybody, on a server without keys: it listens on loopback and trusts its user."""


class Keys:
    """While no key was ever made, every caller is LOCAL; from the first key on, a key is needed."""

    def __init__(self, db: Database, clock: Callable[[], float]) -> None:
        self._db = db
        self._clock = clock
        self.required = False

    async def start(self) -> None:
        self.required = await self._db.read(queries.any_keys)

    async def authenticate(self, key: str | None) -> Tenant:
        """Raises NotAuthenticated for a missing, unknown or revoked key."""
        if not self.required:
            return LOCAL
        if not key:
            raise NotAuthenticated("X-API-Key is missing")
        digest = _digest(key)
        tenant = await self._db.read(lambda db: queries.tenant_of(db, digest))
        if tenant is None:
            raise NotAuthenticated("the API key is unknown or revoked")
        return tenant

    async def create(self, name: str, tenant: str, project: str) -> str:
        """A new key, in the form the SDK insists on; it is shown this once."""
        key = f"tml-{secrets.token_urlsafe(32)}"
        owner = Tenant(id=TenantId(tenant), project=project, name=name)
        now = self._clock()
        await self._db.write(lambda db: queries.add_key(db, _digest(key), owner, now))
        self.required = True
        return key

    async def revoke(self, name: str) -> int:
        """How many keys of that name were valid until now."""
        now = self._clock()
        return await self._db.write(lambda db: queries.revoke_keys(db, name, now))

    async def all(self) -> list[tuple[str, str, str, float, float | None]]:
        return await self._db.read(queries.list_keys)


def _digest(key: str) -> str:
    return hashlib.sha256(key.encode()).hexdigest()
