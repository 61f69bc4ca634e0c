"""Calls made from an OpenAPI schema: what it allows, and what it nearly does."""

from __future__ import annotations

import asyncio
import json
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

import httpx2
import schemathesis
from fastapi import FastAPI
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from schemathesis import GenerationMode
from starlette.routing import Mount

from server.app import create_app
from server.settings import Settings
from tests.fake_backend import FakeBackend

CALL_S = 5.0

bounded = settings(
    max_examples=12,
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=list(HealthCheck),
)


def documents() -> tuple[dict[str, Any], dict[str, Any]]:
    """The schemas of Tinker's and of OpenAI's surface."""
    with tempfile.TemporaryDirectory() as folder:
        backends = {"tiny/fake": [FakeBackend()]}
        app = create_app(Settings(data=Path(folder), models={}), backends=backends)
    mounted = [route.app for route in app.routes if isinstance(route, Mount)]
    (oai,) = [inner for inner in mounted if isinstance(inner, FastAPI)]
    return app.openapi(), oai.openapi()


def operations(document: dict[str, Any]) -> dict[str, Any]:
    """By "METHOD path"."""
    schema = schemathesis.openapi.from_dict(document)
    found = [result.ok() for result in schema.get_all_operations()]
    return {f"{one.method.upper()} {one.path}": one for one in found}


def cases(operation: Any) -> st.SearchStrategy[Any]:
    """What the schema allows; what it does not, too, where there is anything to get wrong."""
    allowed = operation.as_strategy(generation_mode=GenerationMode.POSITIVE)
    if not operation.body and not operation.query:
        return allowed
    return allowed | operation.as_strategy(generation_mode=GenerationMode.NEGATIVE)


def naming(case: Any, names: Mapping[str, str]) -> Any:
    """The case with things that exist in place of invented ones."""
    for part in (case.path_parameters, case.body):
        if isinstance(part, dict):
            part.update({name: value for name, value in names.items() if name in part})
    return case


async def call(http: httpx2.AsyncClient, case: Any, prefix: str = "") -> httpx2.Response:
    """Raises TimeoutError for an answer that does not come."""
    content = None
    if case.media_type is not None:
        content = case.body if isinstance(case.body, bytes) else json.dumps(case.body).encode()
    query = urlencode(case.query or {}, doseq=True)
    headers = {name: value.encode("latin-1", "replace") for name, value in case.headers.items()}
    if case.media_type is not None:
        headers["content-type"] = case.media_type.encode()
    url = f"http://hearth{prefix}{case.formatted_path}?{query}"
    sending = http.request(case.method, url, content=content, headers=headers)
    return await asyncio.wait_for(sending, CALL_S)


def sentence(response: httpx2.Response, *path: str) -> None:
    """The answer is good, or says in words why it is not."""
    assert response.status_code < 500, response.text
    if response.status_code >= 400:
        told = response.json()
        for name in path:
            told = told[name]
        assert " " in told, told
        assert len(told) < 1000
