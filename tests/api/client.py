"""What a client does over HTTP, in as many words as a test needs."""

from __future__ import annotations

from typing import Any

import httpx2
from fastapi import FastAPI

from tests import bodies

PROTOBUF_TOO = {"accept": "application/x-protobuf, application/json"}


class Client(httpx2.AsyncClient):
    def __init__(self, app: FastAPI, **headers: str) -> None:
        super().__init__(
            transport=httpx2.ASGITransport(app=app, raise_app_exceptions=False),
            base_url="http://hearth/api/v1/",
            headers=headers,
        )
        self.app = app

    @property
    def rooms(self) -> Any:
        return self.app.state.rooms

    async def ask(self, route: str, **body: Any) -> httpx2.Response:
        return await self.post(route, json=body)

    async def answer(self, route: str, **body: Any) -> dict[str, Any]:
        """The body of an answer that must be good."""
        response = await self.ask(route, **body)
        assert response.status_code == 200, response.text
        return response.json()

    async def result(self, promise: dict[str, Any]) -> httpx2.Response:
        """Polls until it is over, as the SDK does."""
        while True:
            body = {"request_id": promise["request_id"]}
            response = await self.post("retrieve_future", json=body, headers=PROTOBUF_TOO)
            if response.status_code != 408:
                return response

    async def session(self, **more: Any) -> str:
        return (await self.answer("create_session", tags=[], sdk_version="0.38.0", **more))[
            "session_id"
        ]

    async def run(self, session: str | None = None, number: int = 0, rank: int = 4) -> str:
        """A run that is ready."""
        promise = await self.answer(
            "create_model",
            session_id=session or await self.session(),
            model_seq_id=number,
            base_model="tiny/fake",
            lora_config={"rank": rank},
        )
        assert (await self.result(promise)).status_code == 200
        return promise["model_id"]

    async def done(self, route: str, **body: Any) -> dict[str, Any]:
        """Promised, and kept."""
        response = await self.result(await self.answer(route, **body))
        assert response.status_code == 200
        return response.json()

    async def train(self, run: str, seq: int, tokens: list[int]) -> dict[str, Any]:
        return await self.answer("forward_backward", **bodies.forward_backward(run, seq, tokens))

    async def saved(self, run: str, seq: int, name: str, **more: Any) -> str:
        """The path of a new training checkpoint."""
        done = await self.done("save_weights", model_id=run, seq_id=seq, path=name, **more)
        return done["path"]

    async def saved_for_sampler(self, run: str, seq: int, name: str) -> str:
        done = await self.done("save_weights_for_sampler", model_id=run, seq_id=seq, path=name)
        return done["path"]

    async def sampler(self, session: str, number: int = 0, **what: Any) -> str:
        what = what or {"base_model": "tiny/fake"}
        body = {"session_id": session, "sampling_session_seq_id": number, **what}
        return (await self.answer("create_sampling_session", **body))["sampling_session_id"]
