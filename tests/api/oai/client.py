"""What an OpenAI client does over HTTP."""

from __future__ import annotations

from typing import Any

import httpx2
from fastapi import FastAPI

MODEL = "tiny/fake"


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
