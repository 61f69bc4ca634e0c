"""The whole service on a backend in memory, spoken to over its own HTTP: no socket, no model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import httpx2
from fastapi import FastAPI

from server.app import create_app
from server.settings import Settings
from tests import bodies
from tests.databases import Clock
from tests.fake_backend import FakeBackend

MODEL = "tiny/fake"
NOON = 1_700_049_600.0
"""2023-11-15T12:00:00Z"""
DAY = "2023-11-15"


class Api:
    """One tenant's calls; `key` None is a caller without one."""

    def __init__(self, app: FastAPI, clock: Clock, key: str | None = None) -> None:
        self.app = app
        self.clock = clock
        self.key = key
        self._seq: dict[str, int] = {}
        transport = httpx2.ASGITransport(app, raise_app_exceptions=False)
        headers = {} if key is None else {"X-API-Key": key}
        self.http = httpx2.AsyncClient(
            transport=transport, base_url="http://hearth/api/v1", headers=headers
        )

    async def create_key(self, tenant: str, project: str = "default") -> Api:
        """Another tenant's calls."""
        key = await self.app.state.rooms.keys.create(tenant, tenant, project)
        return Api(self.app, self.clock, key)

    async def get(self, path: str, status: int = 200, **params: Any) -> Any:
        answer = await self.http.get(path, params=params)
        assert answer.status_code == status, answer.text
        return answer.json()

    async def send(self, method: str, path: str, body: Any = None, status: int = 200) -> Any:
        answer = await self.http.request(method, path, json=body)
        assert answer.status_code == status, answer.text
        return answer.json()

    async def post(self, path: str, body: Any = None, status: int = 200) -> Any:
        return await self.send("POST", path, body, status)

    async def outcome(self, promise: dict[str, Any]) -> httpx2.Response:
        while True:
            body = {"request_id": promise["request_id"]}
            answer = await self.http.post("retrieve_future", json=body)
            if answer.status_code != 408:
                return answer

    async def session(self, **fields: Any) -> str:
        body = {"tags": [], "sdk_version": "0.38.0", **fields}
        return (await self.post("create_session", body))["session_id"]

    async def run(self, session: str, number: int = 0) -> str:
        body = {"session_id": session, "model_seq_id": number, "base_model": MODEL}
        created = await self.outcome(await self.post("create_model", body))
        return created.json()["model_id"]

    async def save(self, run: str, path: str, kind: str = "save_weights", **fields: Any) -> str:
        """A checkpoint's tinker:// path."""
        promise = await self.post(kind, self.numbered(run, path=path, **fields))
        saved = (await self.outcome(promise)).json()
        assert "path" in saved, saved
        return saved["path"]

    async def train(self, run: str, tokens: int, call: str = "forward_backward") -> Any:
        return await self.outcome(await self.post(call, self.pass_body(run, tokens, call)))

    def pass_body(self, run: str, tokens: int, call: str = "forward_backward") -> dict[str, Any]:
        seq = self.numbered(run)["seq_id"]
        return bodies.forward_backward(run, seq, [5] * tokens, backward=call != "forward")

    def numbered(self, run: str, **fields: Any) -> dict[str, Any]:
        """A body with the run's next seq_id."""
        self._seq[run] = self._seq.get(run, 0) + 1
        return {"model_id": run, "seq_id": self._seq[run], **fields}

    async def sampler(self, session: str) -> str:
        body = {"session_id": session, "sampling_session_seq_id": 0, "base_model": MODEL}
        return (await self.post("create_sampling_session", body))["sampling_session_id"]

    async def sample(self, sampler: str, prompt: int, max_tokens: int, **fields: Any) -> Any:
        self._seq[sampler] = self._seq.get(sampler, -1) + 1
        params = {"max_tokens": max_tokens}
        seq = self._seq[sampler]
        body = bodies.sample(sampler, seq, [5] * prompt, sampling_params=params, **fields)
        return await self.outcome(await self.post("asample", body))


def url(path: str) -> str:
    """Where REST has a checkpoint of a session's run."""
    return path.replace("tinker://", "training_runs/").replace(":0/", ":0/checkpoints/", 1)


def new_app(data: Path, backend: FakeBackend, clock: Clock) -> FastAPI:
    settings = Settings(models={MODEL: data}, data=data, long_poll_s=1.0, gap_wait_s=0.0)
    return create_app(settings, clock=clock, backends={MODEL: [backend]})
