"""A backend in memory that keeps both protocols: small honest arithmetic in which the order of
requests matters, and tokens that make it fail in chosen ways."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from backends.contract import (
    AdapterSpec,
    BackendError,
    Contents,
    CustomLoss,
    Failure,
    ForwardBackward,
    LossResult,
    LossSignature,
    MemoryReport,
    ModelInfo,
    OptimStep,
    Partial,
    PassOutcome,
    RunMemory,
    SampledSequence,
    SampleRequest,
    SampleResult,
    StepResult,
)

REFUSED_TOKEN = 13
"""Its request comes back as a Failure of its user."""
DEADLY_TOKEN = 66
"""The backend dies of it, with every run in it."""
BUG_TOKEN = 77
"""The call raises something that no contract speaks of."""

RUN_BYTES = 100
"""What the weights of a run take, its moments, and its gradient each."""

INFO = ModelInfo(
    vocab_size=100,
    max_context_length=64,
    num_parameters=1000,
    dtype="float32",
    device="cpu",
    trainable_groups=("attn", "mlp", "unembed"),
    eos_token_ids=(2,),
    losses={"cross_entropy": LossSignature(required=("target_tokens",), optional=("weights",))},
)


@dataclass
class FakeRun:
    """`weight` after a step depends on all gradients and steps before it, and on their order."""

    spec: AdapterSpec
    weight: float = 1.0
    moment: float = 0.0
    gradient: float = 0.0
    steps: int = 0


class FakeBackend:
    """`hold` it to keep calls waiting; `kill` it to lose what is in memory and the calls under way.
    Like the supervised worker, the first call after a death starts it again."""

    def __init__(self) -> None:
        self.generation = 1
        self.alive = True
        self.runs: dict[str, FakeRun] = {}
        self.passes: list[list[str]] = []
        """The runs of each forward_backward call."""
        self.pass_tokens: list[int] = []
        self.begun: dict[str, list[ForwardBackward]] = {}
        """Of each run the parts of a request that have come so far."""
        self.most_runs = 0
        self.steps: list[list[str]] = []
        self.calls: list[str] = []
        self.sampled: list[SampleRequest] = []
        self.updates: list[tuple[str, str]] = []
        self.die_in: dict[str, int] = {}
        """After how many more calls of a method it dies in one."""
        self.pass_seconds = 0.0
        self._deaths = 0
        self._open = asyncio.Event()
        self._open.set()
        self._cancelled: set[str] = set()

    def hold(self) -> None:
        self._open.clear()

    def let_go(self) -> None:
        self._open.set()

    def kill(self) -> None:
        self.alive = False
        self._deaths += 1
        self.runs = {}
        self.begun = {}

    async def stop(self, grace_s: float) -> None:
        self.kill()

    async def describe(self) -> ModelInfo:
        await self._enter("describe")
        return INFO

    async def check_loss(self, loss: CustomLoss) -> str | None:
        await self._enter("check_loss")
        return None

    async def create(self, run: str, spec: AdapterSpec) -> None:
        await self._enter("create")
        self._put(run, FakeRun(spec))

    async def forward_backward(self, requests: Sequence[ForwardBackward]) -> list[PassOutcome]:
        await self._enter("forward_backward")
        self.passes.append([request.run for request in requests])
        self.pass_tokens.append(sum(request.num_tokens for request in requests))
        await self._survive(asyncio.sleep(self.pass_seconds))
        tokens = {int(t) for request in requests for datum in request.data for t in datum.tokens}
        if DEADLY_TOKEN in tokens:
            self._die()
        results = [self._part(request) for request in requests]
        if BUG_TOKEN in tokens:
            raise ZeroDivisionError("a bug of the backend")
        return results

    async def optim_step(self, steps: Sequence[OptimStep]) -> list[StepResult | Failure]:
        await self._enter("optim_step")
        self.steps.append([step.run for step in steps])
        assert len({step.run for step in steps}) == len(steps)
        assert not self.begun.keys() & {step.run for step in steps}, "in the middle of a request"
        return [self._step(step) for step in steps]

    async def save(self, run: str, directory: str, contents: Contents) -> int:
        await self._enter("save")
        state = self._run(run)
        return _write(Path(directory), {"contents": contents, **asdict(state)})

    async def load(self, run: str, directory: str, contents: Contents) -> AdapterSpec:
        await self._enter("load")
        saved = _read(Path(directory))
        state = FakeRun(AdapterSpec(**saved["spec"]), weight=saved["weight"])
        if contents != "adapter":
            state.moment, state.steps = saved["moment"], saved["steps"]
        if contents == "snapshot":
            assert saved["contents"] == "snapshot"
            state.gradient = saved["gradient"]
        self._put(run, state)
        return state.spec

    async def unload(self, run: str) -> None:
        await self._enter("unload")
        self.runs.pop(run, None)
        self.begun.pop(run, None)

    async def memory(self) -> MemoryReport:
        await self._enter("memory")
        return MemoryReport(
            base_model=1000,
            runs={
                name: RunMemory(
                    weights=RUN_BYTES,
                    moments=RUN_BYTES if run.steps else 0,
                    gradient=RUN_BYTES if run.gradient else 0,
                    on_device=False,
                )
                for name, run in self.runs.items()
            },
        )

    async def sample(self, request: SampleRequest) -> SampleResult | Failure:
        await self._enter("sample")
        self.sampled.append(request)
        if DEADLY_TOKEN in request.prompt:
            self._die()
        if BUG_TOKEN in request.prompt:
            raise ZeroDivisionError("a bug of the engine")
        if request.request_id in self._cancelled:
            return Failure(message="cancelled", category="user")
        if request.adapter is not None:
            _read(Path(request.adapter))
        sequence = SampledSequence(
            tokens=np.full(request.max_tokens, 5, dtype=np.int32),
            logprobs=np.zeros(request.max_tokens, dtype=np.float32),
            stop_reason="length",
        )
        return SampleResult(sequences=(sequence,) * request.num_samples)

    async def cancel(self, request_id: str) -> None:
        self._cancelled.add(request_id)

    async def update(self, old: str, new: str) -> None:
        self.updates.append((old, new))

    async def _enter(self, call: str) -> None:
        await self._survive(self._open.wait())
        self.calls.append(call)
        if not self.alive:
            self.alive = True
            self.generation += 1
        if call in self.die_in:
            self.die_in[call] -= 1
            if self.die_in[call] < 0:
                del self.die_in[call]
                self._die()

    async def _survive(self, wait: Awaitable[object]) -> None:
        deaths = self._deaths
        await wait
        if self._deaths != deaths:
            raise BackendError("the worker ended with code -9")

    def _die(self) -> None:
        self.kill()
        raise BackendError("the worker ended with code -9")

    def _run(self, run: str) -> FakeRun:
        if run not in self.runs:
            raise BackendError(f"run {run} is not loaded")
        return self.runs[run]

    def _put(self, run: str, state: FakeRun) -> None:
        self.runs[run] = state
        self.begun.pop(run, None)
        self.most_runs = max(self.most_runs, len(self.runs))

    def _part(self, request: ForwardBackward) -> PassOutcome:
        """What a request's parts give is what it would give whole."""
        if request.run not in self.runs:
            return Failure(message=f"run {request.run} is not loaded", category="server")
        begun = [*self.begun.pop(request.run, []), request]
        assert all((one.loss, one.backward) == (request.loss, request.backward) for one in begun), (
            "parts of two requests"
        )
        data = tuple(datum for one in begun for datum in one.data)
        if request.more and not any(REFUSED_TOKEN in datum.tokens for datum in data):
            self.begun[request.run] = begun
            return Partial()
        return self._pass(replace(request, data=data))

    def _pass(self, request: ForwardBackward) -> LossResult | Failure:
        state = self.runs[request.run]
        if any(REFUSED_TOKEN in datum.tokens for datum in request.data):
            return Failure(message="the loss is not finite", category="user")
        total = float(sum(int(datum.tokens.sum()) for datum in request.data))
        if request.backward:
            state.gradient += total
        outputs = tuple(_outputs(len(datum.tokens)) for datum in request.data)
        return LossResult(outputs=outputs, metrics={"loss:sum": total * state.weight})

    def _step(self, step: OptimStep) -> StepResult | Failure:
        if step.run not in self.runs:
            return Failure(message=f"run {step.run} is not loaded", category="server")
        state = self.runs[step.run]
        state.moment = 0.5 * state.moment + state.gradient
        state.weight = 0.9 * state.weight + step.learning_rate * state.moment
        state.gradient, state.steps = 0.0, state.steps + 1
        return StepResult(metrics={"weight": state.weight, "steps": float(state.steps)})


def _write(folder: Path, state: dict[str, Any]) -> int:
    """As a backend must: to a folder that is not there yet."""
    folder.mkdir()
    return (folder / "adapter_model.safetensors").write_text(json.dumps(state))


def _read(folder: Path) -> dict[str, Any]:
    file = folder / "adapter_model.safetensors"
    if not file.exists():
        raise BackendError(f"{folder} holds no run")
    return json.loads(file.read_text())


def _outputs(length: int) -> dict[str, np.ndarray]:
    zeros = np.zeros(length, dtype=np.float32)
    return {"logprobs": zeros, "elementwise_loss": zeros}
