"""A vLLM that generates the token 7, for what a real one does not do on command."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

from aiohttp import web
from aiohttp.test_utils import TestServer

Handler = Callable[[web.Request], Any]


class FakeServer:
    def __init__(self) -> None:
        self.loaded: dict[str, str] = {}
        self.log: list[tuple[str, Any]] = []
        self.open = asyncio.Event()
        """What waits for it holds every answer to a load back."""
        self.open.set()
        self.broken: list[int] = []
        """Statuses that the next calls to generate are answered with."""

    async def load(self, request: web.Request) -> web.Response:
        body = await request.json()
        self.log.append(("load", body["lora_path"]))
        await self.open.wait()
        if "bad" in body["lora_path"]:
            return problem(500, "LoRA rank 64 is greater than max_lora_rank 32.")
        if body["lora_name"] in self.loaded:
            return problem(400, "The lora adapter has already been loaded.")
        self.loaded[body["lora_name"]] = body["lora_path"]
        return web.Response(text="Success")

    async def unload(self, request: web.Request) -> web.Response:
        body = await request.json()
        self.log.append(("unload", self.loaded.pop(body["lora_name"], None)))
        return web.Response(text="Success")

    async def generate(self, request: web.Request) -> web.Response:
        body = await request.json()
        self.log.append(("generate", body["model"]))
        if self.broken:
            return problem(self.broken.pop(0), "EngineCore encountered an issue.")
        if body["model"] != "base" and body["model"] not in self.loaded:
            return problem(404, "The model does not exist.")
        params = body["sampling_params"]
        content = [{"token_id": 7, "logprob": -0.5, "top_logprobs": []}] * params["max_tokens"]
        choices = [
            {
                "index": i,
                "token_ids": [7] * params["max_tokens"],
                "logprobs": {"content": content},
                "finish_reason": "length",
            }
            for i in range(params.get("n", 1))
        ]
        return web.json_response({"choices": choices, "usage": None})

    async def health(self, _: web.Request) -> web.Response:
        return web.Response()


def problem(status: int, message: str) -> web.Response:
    return web.json_response({"error": {"message": message, "code": status}}, status=status)


@asynccontextmanager
async def serving(fake: FakeServer) -> AsyncIterator[str]:
    app = web.Application()
    app.router.add_post("/v1/load_lora_adapter", fake.load)
    app.router.add_post("/v1/unload_lora_adapter", fake.unload)
    app.router.add_post("/inference/v1/generate", fake.generate)
    app.router.add_get("/health", fake.health)
    async with TestServer(app) as server:
        yield f"http://127.0.0.1:{server.port}"
