"""API keys: who is calling."""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Callable
from dataclasses import dataclass

from server.audit import queries as audit_queries
from server.audit.events import of_key
from server.core.errors import BadInput, InvalidToken, NotAuthenticated
from server.core.ids import TenantId
from server.core.records import Tenant
from server.store.database import AsyncSession, Database
from server.tenancy import queries
from server.tenancy.tokens import Tokens

LOCAL = Tenant(id=TenantId("local"))
"""Everybody, on a server without keys: it listens on loopback and trusts its user."""

TOKEN_PREFIX = "eyJ"
"""What every JWT starts with, and no API key."""
_LOOK_EVERY_S = 1.0


@dataclass(frozen=True, slots=True)
class Credential:
    """Who is calling, and by which key."""

    tenant: Tenant
    digest: str
    """Of the key; empty on a server without keys."""

    @property
    def key_id(self) -> int:
        """A number for the key, which the SDK wants; few enough digits for any JSON reader."""
        return int(self.digest[:12] or "0", 16)


class Keys:
    """While no key was ever made, every caller is LOCAL; from the first key on, a key is needed."""

    def __init__(
        self, db: Database, clock: Callable[[], float], tokens: Tokens | None = None
    ) -> None:
        self._db = db
        self._clock = clock
        self._tokens = tokens
        self.required = False
        self._looked_at = 0.0

    async def start(self) -> None:
        self.required = await self._db.read(queries.any_keys)

    async def authenticate(self, key: str | None) -> Tenant:
        """Raises NotAuthenticated for a missing, unknown or revoked key."""
        return (await self.identify(key)).tenant

    async def identify(self, key: str | None) -> Credential:
        """Who is calling, and by which key: `key` is one, or a token that stands for one.

        Raises NotAuthenticated, or InvalidToken where another token may help."""
        if not self.required and not await self._first_was_made():
            return Credential(LOCAL, "")
        if not key:
            raise NotAuthenticated("X-API-Key is missing")
        if self._tokens is None or not key.startswith(TOKEN_PREFIX):
            digest, refusal = _digest(key), NotAuthenticated("the API key is unknown or revoked")
        else:
            digest = self._tokens.key_digest(key)
            refusal = InvalidToken("the API key behind the token is unknown or revoked")
        tenant = await self._db.read(lambda db: queries.tenant_of(db, digest))
        if tenant is None:
            raise refusal
        return Credential(tenant, digest)

    async def token(self, key: str | None) -> str:
        """A token for the key; a token gets itself, so that nobody can prolong one for ever."""
        assert self._tokens is not None
        credential = await self.identify(key)
        if credential.digest and key and key.startswith(TOKEN_PREFIX):
            return key
        return self._tokens.issue(credential.tenant, credential.digest)

    async def create(self, name: str, tenant: str, project: str) -> str:
        """A new key, in the form the SDK insists on; it is shown this once."""
        key = f"tml-{secrets.token_urlsafe(32)}"
        owner = Tenant(id=TenantId(tenant), project=project, name=name)
        now = self._clock()

        async def work(db: AsyncSession) -> None:
            await queries.add_key(db, _digest(key), owner, now)
            await audit_queries.add(db, of_key("created", owner, now))

        await self._db.write(work)
        self.required = True
        return key

    async def revoke(self, name: str) -> int:
        """How many keys of that name were valid until now."""
        now = self._clock()

        async def work(db: AsyncSession) -> int:
            for tenant in await queries.holders(db, name):
                await audit_queries.add(db, of_key("revoked", tenant, now))
            return await queries.revoke_keys(db, name, now)

        return await self._db.write(work)

    async def revoke_own(self, credential: Credential) -> None:
        """End the key that the caller came with, and its tokens."""
        if not credential.digest:
            raise BadInput("this server asks for no API key, so there is none to delete")
        now = self._clock()

        async def work(db: AsyncSession) -> None:
            await queries.revoke_key(db, credential.digest, now)
            await audit_queries.add(db, of_key("revoked", credential.tenant, now))

        await self._db.write(work)

    async def _first_was_made(self) -> bool:
        """`hearth keys create` runs beside the server: look now and then whether it has."""
        now = self._clock()
        if now - self._looked_at >= _LOOK_EVERY_S:
            self._looked_at = now
            self.required = await self._db.read(queries.any_keys)
        return self.required

    async def all(self) -> list[tuple[str, str, str, float, float | None]]:
        return await self._db.read(queries.list_keys)


def _digest(key: str) -> str:
    return hashlib.sha256(key.encode()).hexdigest()
