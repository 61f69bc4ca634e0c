"""The service with a tokenizer and a chat template, and a backend that writes by script."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Any

import httpx2
import pytest
import pytest_asyncio
from fastapi import FastAPI

from server.settings import Settings
from tests.api.client import Client
from tests.api.oai.writer import Writer
from tests.tiny_models import with_tokenizer

MODEL = "tiny/fake"
TEMPLATE = (
    "{% for m in messages %}{{ m.role[0] }}:{{ m.content }}\n{% endfor %}"
    "{% if messages[0].content == 'refuse' %}{{ raise_exception('not this') }}{% endif %}"
    "{% if add_generation_prompt %}a:{% endif %}"
)


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = with_tokenizer(tmp_path_factory.mktemp("talking"))
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    return folder


@pytest.fixture
def backend() -> Writer:
    return Writer()


@pytest.fixture
def settings(data: Path, model_folder: Path) -> Settings:
    return Settings(
        data=data,
        models={MODEL: model_folder},
        long_poll_s=0.05,
        max_body_bytes=2**20,
        max_waiting_samples=3,
    )


class Oai:
    def __init__(self, app: FastAPI, key: str = "") -> None:
        headers = {"authorization": f"Bearer {key}"} if key else {}
        self.http = httpx2.AsyncClient(
            transport=httpx2.ASGITransport(app=app, raise_app_exceptions=False),
            base_url="http://hearth/oai/api/v1/",
            headers=headers,
        )

    async def chat(self, content: Any = "Hi", **more: Any) -> httpx2.Response:
        messages = [{"role": "user", "content": content}]
        return await self.http.post(
            "chat/completions", json={"model": MODEL, "messages": messages, **more}
        )

    async def complete(self, prompt: Any = "Hi", **more: Any) -> httpx2.Response:
        return await self.http.post("completions", json={"model": MODEL, "prompt": prompt, **more})


@pytest_asyncio.fixture
async def oai(client: Client) -> AsyncGenerator[Oai]:
    oai = Oai(client.app)
    async with oai.http:
        yield oai
