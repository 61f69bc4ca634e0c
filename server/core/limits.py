"""Limits that clients run into, and the sentences that tell them so."""

from __future__ import annotations

from typing import Any

from server.core.errors import BadInput

MIN_TTL_S = 3600
MAX_TTL_S = 10 * 365 * 24 * 3600


def check_ttl(seconds: int | None) -> int | None:
    """A checkpoint's lifetime as the client may set it; None keeps it for ever."""
    if seconds is not None and not MIN_TTL_S <= seconds <= MAX_TTL_S:
        raise BadInput(
            f"ttl_seconds is {seconds}; it must be between {MIN_TTL_S} (an hour) "
            f"and {MAX_TTL_S} (10 years)"
        )
    return seconds


def text_metadata(metadata: dict[str, Any] | None) -> dict[str, str]:
    """Metadata as the SDK reads it back: one value that is no string would break its listings."""
    return {
        key: value if isinstance(value, str) else str(value)
        for key, value in (metadata or {}).items()
    }
