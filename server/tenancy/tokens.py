"""JWTs that stand for an API key for a while: how the SDK learns who it is (`whoami`)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jwt

from server.core.errors import InvalidToken
from server.core.ids import user_urn
from server.core.records import Tenant

LIFETIME_S = 24 * 3600
"""A client renews its token half way, and uses the old one while the server is away: this is
how long an outage it outlasts. Ending the key ends its tokens at once."""

_ALGORITHM = "HS256"
_ISSUER = "passport-hearth"
"""The SDK reads an identity out of a JWT that was given as a key only from such issuers."""
_KEY = "key"


class Tokens:
    def __init__(self, secret: bytes, clock: Callable[[], float]) -> None:
        self._secret = secret
        self._clock = clock

    def issue(self, tenant: Tenant, key_digest: str) -> str:
        """A token for whoever holds that key; "" for a server without keys."""
        now = int(self._clock())
        claims = {
            "iss": _ISSUER,
            "sub": user_urn(tenant.id),
            "org_id": tenant.id,
            "email": email(tenant),
            "iat": now,
            "exp": now + LIFETIME_S,
            _KEY: key_digest,
        }
        return jwt.encode(claims, self._secret, _ALGORITHM)

    def key_digest(self, token: str) -> str:
        """The key that a token stands for. Raises InvalidToken, at which the SDK asks for
        another."""
        claims = self._claims(token)
        if claims["exp"] <= self._clock():
            raise InvalidToken("the token has expired")
        return claims[_KEY]

    def _claims(self, token: str) -> dict[str, Any]:
        try:
            return jwt.decode(
                token,
                self._secret,
                [_ALGORITHM],
                # Times are checked by the service's own clock.
                options={
                    "require": ["exp", _KEY],
                    "verify_exp": False,
                    "verify_iat": False,
                    "verify_nbf": False,
                },
                issuer=_ISSUER,
            )
        except jwt.InvalidTokenError as error:
            raise InvalidToken("the token was not made by this server") from error


def email(tenant: Tenant) -> str:
    """Tenants have names, and no mailbox unless they are named after it."""
    return tenant.id if "@" in tenant.id else f"{tenant.id}@hearth.local"
