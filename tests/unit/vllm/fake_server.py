"""A vLLM that generates the token 7, for what a real one does not do on command."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from aiohttp import web
from aiohttp.test_utils import TestServer


class FakeServer:
    def __init__(self) -> None:
        self.loaded: dict[str, str] = {}
        self.log: list[tuple[str, Any]] = []
        self.open = asyncio.Event()
        """While it is not set, nothing is loaded or paused."""
        self.open.set()
        self.broken: list[int] = []
        """Statuses that the next calls to generate are answered with."""
        self.sessions: list[str | None] = []
        """What the calls to generate say that they belong to."""
        self.served_name = "base"
        self.max_model_len = 64
        self.vocab_size = 100
        self.flowing = asyncio.Event()
        """While it is not set, what is generated is not done."""
        self.flowing.set()
        self.late_health_answers = 0
        """How many of the next come when `over` is set."""
        self.over = asyncio.Event()
        self._aborted = asyncio.Event()

    async def load(self, request: web.Request) -> web.Response:
        body = await request.json()
        self.log.append(("load", body["lora_path"]))
        await self.open.wait()
        if "bad" in body["lora_path"]:
            return problem(500, "LoRA rank 64 is greater than max_lora_rank 32.")
        if body["lora_name"] in self.loaded and not body["load_inplace"]:
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
        self.sessions.append(request.headers.get("x-session-id"))
        if max(body["token_ids"]) >= self.vocab_size:
            return problem(400, "Token id is out of vocabulary.")
        if self.broken:
            return problem(self.broken.pop(0), "EngineCore encountered an issue.")
        if body["model"] != "base" and body["model"] not in self.loaded:
            return problem(404, "The model does not exist.")
        if await self._is_aborted():
            aborted = {"index": 0, "token_ids": [], "finish_reason": "abort"}
            return web.json_response({"choices": [aborted], "usage": None})
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

    async def pause(self, request: web.Request) -> web.Response:
        self.log.append(("pause", request.query["mode"]))
        await self.open.wait()
        self.flowing.clear()
        if request.query["mode"] == "abort":
            self._aborted.set()
            self._aborted = asyncio.Event()
        return web.json_response({"status": "paused"})

    async def resume(self, _: web.Request) -> web.Response:
        self.log.append(("resume", None))
        self.flowing.set()
        return web.json_response({"status": "resumed"})

    async def version(self, _: web.Request) -> web.Response:
        return web.json_response({"version": "0.0.fake"})

    async def models(self, _: web.Request) -> web.Response:
        if self.served_name == "<html>":
            return web.Response(text="<html>")
        base = {"id": self.served_name, "max_model_len": self.max_model_len}
        return web.json_response({"data": [base]})

    async def _is_aborted(self) -> bool:
        aborted = self._aborted
        waits = [asyncio.create_task(one.wait()) for one in (self.flowing, aborted)]
        await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        for wait in waits:
            wait.cancel()
        return aborted.is_set()

    async def health(self, _: web.Request) -> web.Response:
        if self.late_health_answers:
            self.late_health_answers -= 1
            await self.over.wait()
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
    app.router.add_get("/version", fake.version)
    app.router.add_get("/v1/models", fake.models)
    app.router.add_post("/pause", fake.pause)
    app.router.add_post("/resume", fake.resume)
    async with TestServer(app) as server:
        yield f"http://127.0.0.1:{server.port}"
