"""The service with a tokenizer and a chat template, and a backend that writes by script."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from pathlib import Path

import pytest
import pytest_asyncio

from server.settings import Settings
from tests.api.client import Client
from tests.api.oai.client import MODEL, Oai
from tests.api.oai.writer import Writer
from tests.tiny_models import with_tokenizer

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


@pytest_asyncio.fixture
async def oai(client: Client) -> AsyncGenerator[Oai]:
    oai = Oai(client.app)
    async with oai.http:
        yield oai
