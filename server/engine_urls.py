"""vLLM servers of somebody else, as the settings name them."""

from __future__ import annotations

from urllib.parse import urlsplit

from server.settings import Settings


def refusal(settings: Settings) -> str | None:
    """Why they cannot be used, if there are any."""
    if not settings.engine_urls:
        return None
    if settings.engine != "vllm":
        return (
            f"engine_urls are given, and engine is {settings.engine!r}, which uses none: set "
            "engine to 'vllm', or leave them out"
        )
    if len(settings.models) != 1:
        return "engine_urls are those of one base model: serve just one"
    for url in settings.engine_urls:
        if not _is_server_url(url):
            return f"engine_urls has {url!r}, which is not of the form http://HOST:PORT"
    return None


def _is_server_url(url: str) -> bool:
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError:
        return False
    host = parts.hostname or ""
    beyond = (parts.path.removeprefix("/"), parts.query, parts.fragment, parts.username)
    named = bool(host) and not any(char.isspace() for char in host) and port != 0
    return parts.scheme in ("http", "https") and named and not any(beyond)
