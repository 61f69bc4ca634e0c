"""A real worker with a tiny model."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import time
from asyncio.subprocess import PIPE
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import psutil
import pytest
import pytest_asyncio

from backends.contract import (
    AdapterSpec,
    BackendError,
    Datum,
    Failure,
    ForwardBackward,
    LossResult,
    OptimStep,
    Partial,
    SampleRequest,
    SampleResult,
    StepResult,
)
from backends.workers.commands import local_worker
from backends.workers.subprocess import SubprocessBackend
from tests.tiny_models import VOCAB_SIZE, tiny_llama, with_tokenizer

pytestmark = pytest.mark.asyncio(loop_scope="module")

SPEC = AdapterSpec(rank=4, alpha=8.0, seed=1, train_attn=True, train_mlp=True, train_unembed=True)


@pytest.fixture(scope="module")
def model_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return with_tokenizer(tiny_llama(tmp_path_factory.mktemp("base")))


async def started(model_path: Path, log_file: Path) -> SubprocessBackend:
    command = local_worker(
        model_path,
        dtype="float32",
        threads=1,
        max_tokens_per_microbatch=64,
        visible_devices="",
    )
    return await SubprocessBackend.start(command, log_file)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def backend(
    model_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[SubprocessBackend]:
    """Shared by the tests that leave it whole."""
    backend = await started(model_path, tmp_path_factory.mktemp("logs") / "worker.log")
    yield backend
    await backend.stop(5.0)
    assert backend.closed


def work(run: str, num_data: int = 2, length: int = 30) -> ForwardBackward:
    tokens = np.random.default_rng(0).integers(0, VOCAB_SIZE, length)
    inputs = {"target_tokens": np.roll(tokens, -1), "weights": np.ones(length, np.float32)}
    data = tuple(Datum(tokens=tokens, loss_inputs=inputs) for _ in range(num_data))
    return ForwardBackward(run=run, data=data, loss="cross_entropy")


def question(name: str, adapter: str | None = None, max_tokens: int = 10) -> SampleRequest:
    return SampleRequest(
        request_id=name,
        prompt=np.arange(5),
        num_samples=1,
        max_tokens=max_tokens,
        adapter=adapter,
        temperature=0.0,
    )


async def test_a_run_is_trained_saved_and_sampled(backend: SubprocessBackend, tmp_path: Path):
    info = await backend.describe()
    assert (info.vocab_size, info.dtype) == (VOCAB_SIZE, "float32")
    await backend.create("r", SPEC)
    losses = []
    for _ in range(5):
        (result,) = await backend.forward_backward([work("r")])
        assert isinstance(result, LossResult)
        assert result.outputs[0]["logprobs"].shape == (30,)
        losses.append(result.metrics["loss:sum"])
        (step,) = await backend.optim_step([OptimStep(run="r", learning_rate=0.02)])
        assert isinstance(step, StepResult)
    assert losses[-1] < losses[0]
    folder = str(tmp_path / "saved")
    assert await backend.save("r", folder, "optimizer") > 1000
    assert await backend.load("copy", folder, "optimizer") == SPEC
    await backend.unload("copy")
    tuned, base = await asyncio.gather(
        backend.sample(question("tuned", folder)), backend.sample(question("base"))
    )
    assert isinstance(tuned, SampleResult)
    assert isinstance(base, SampleResult)
    assert tuned.sequences[0].tokens.tolist() != base.sequences[0].tokens.tolist()


async def test_a_request_may_come_in_parts(backend: SubprocessBackend):
    for run in ("whole", "parts"):
        await backend.create(run, SPEC)
    (whole,) = await backend.forward_backward([work("whole", num_data=3)])
    data = work("parts", num_data=3).data
    outcomes = [
        (await backend.forward_backward([replace(work("parts"), data=part, more=more)]))[0]
        for part, more in ((data[:1], True), (data[1:2], True), (data[2:], False))
    ]
    assert outcomes[:2] == [Partial(), Partial()]
    assert isinstance(whole, LossResult)
    assert isinstance(outcomes[2], LossResult)
    assert outcomes[2].metrics == pytest.approx(whole.metrics, rel=1e-5)
    assert len(outcomes[2].outputs) == 3


async def test_it_tells_what_its_runs_take(backend: SubprocessBackend):
    await backend.create("r", SPEC)
    fresh = await backend.memory()
    await backend.forward_backward([work("r")])
    (step,) = await backend.optim_step([OptimStep(run="r", learning_rate=0.02)])
    assert isinstance(step, StepResult)
    trained = await backend.memory()
    assert fresh.base_model == trained.base_model > 1000
    assert fresh.runs["r"].moments == 0
    assert trained.runs["r"].moments == 2 * trained.runs["r"].weights > 0
    await backend.unload("r")
    assert "r" not in (await backend.memory()).runs


async def test_training_and_sampling_go_on_side_by_side(backend: SubprocessBackend):
    for run in ("a", "b"):
        await backend.create(run, SPEC)
    finished: list[str] = []

    async def train(run: str) -> None:
        results = await backend.forward_backward([work(run, num_data=60), work("missing")])
        assert isinstance(results[0], LossResult)
        assert isinstance(results[1], Failure)
        finished.append("train")

    async def sample(name: str) -> None:
        assert isinstance(await backend.sample(question(name, max_tokens=3)), SampleResult)
        finished.append("sample")

    await asyncio.gather(train("a"), train("b"), *(sample(str(i)) for i in range(4)))
    assert finished.index("sample") < finished.index("train")
    assert sorted(finished) == ["sample"] * 4 + ["train"] * 2


async def test_a_sample_is_cancelled_by_name_or_with_its_caller(backend: SubprocessBackend):
    first = asyncio.create_task(backend.sample(question("first", max_tokens=400)))
    second = asyncio.create_task(backend.sample(question("second", max_tokens=400)))
    await asyncio.sleep(0)
    await backend.cancel("first")
    assert await first == Failure(message="cancelled by the client", category="user")
    second.cancel()
    with pytest.raises(asyncio.CancelledError):
        await second
    assert isinstance(await backend.sample(question("second")), SampleResult)


async def test_a_call_that_breaks_breaks_alone(backend: SubprocessBackend, tmp_path: Path):
    await backend.create("r", SPEC)
    file = tmp_path / "file"
    file.write_text("")
    results = await asyncio.gather(
        backend.save("r", str(file / "folder"), "adapter"),
        backend.save("unknown", str(tmp_path / "x"), "adapter"),
        backend.load("r", str(tmp_path / "nowhere"), "adapter"),
        backend.sample(question("q")),
        return_exceptions=True,
    )
    assert [type(r) for r in results] == [BackendError] * 3 + [SampleResult]
    assert "NotADirectoryError" in str(results[0])
    assert not backend.closed
    assert isinstance((await backend.forward_backward([work("r")]))[0], LossResult)


async def test_a_malformed_call_is_answered_and_not_fatal(backend: SubprocessBackend):
    bad = AdapterSpec(
        rank="four",  # pyrefly: ignore[bad-argument-type]
        alpha=8.0,
        seed=1,
        train_attn=True,
        train_mlp=True,
        train_unembed=True,
    )
    with pytest.raises(BackendError, match=r"malformed call.*rank"):
        await backend.create("r", bad)
    await backend.create("r", SPEC)


async def test_a_killed_worker_fails_what_was_under_way(model_path: Path, tmp_path: Path):
    backend = await started(model_path, tmp_path / "worker.log")
    await backend.create("r", SPEC)
    calls = [
        asyncio.create_task(backend.forward_backward([work("r", num_data=400)])),
        asyncio.create_task(backend.sample(question("q", max_tokens=400))),
    ]
    await asyncio.sleep(0.1)
    assert not backend.closed
    os.kill(backend.pid, signal.SIGKILL)
    for call in calls:
        with pytest.raises(BackendError, match="ended with code -9"):
            await call
        assert backend.closed, "whoever hears of it can start another at once"
    await backend.wait_closed()
    with pytest.raises(BackendError, match="code -9"):
        await backend.describe()


async def test_a_worker_that_cannot_start_says_why(tmp_path: Path):
    log_file = tmp_path / "worker.log"
    log_file.write_text("an earlier worker's words\n")
    with pytest.raises(BackendError, match="nowhere") as caught:
        await started(tmp_path / "nowhere", log_file)
    assert "earlier" not in str(caught.value)


async def test_ctrl_c_in_the_terminal_is_not_for_the_worker(backend: SubprocessBackend):
    assert os.getpgid(backend.pid) != os.getpgid(0)
    os.kill(backend.pid, signal.SIGINT)
    assert (await backend.describe()).vocab_size == VOCAB_SIZE


async def test_stop_lets_the_worker_leave_by_itself(model_path: Path, tmp_path: Path):
    log_file = tmp_path / "worker.log"
    backend = await started(model_path, log_file)
    await backend.create("r", SPEC)
    running = asyncio.create_task(backend.forward_backward([work("r", num_data=400)]))
    await asyncio.sleep(0.05)
    await backend.stop(20.0)
    with pytest.raises(BackendError, match="was stopped"):
        await running
    assert log_file.read_text().splitlines()[-1].endswith("stopped")
    await backend.stop(1.0)


async def test_a_worker_sees_the_devices_that_are_its_own(backend: SubprocessBackend):
    assert psutil.Process(backend.pid).environ()["CUDA_VISIBLE_DEVICES"] == ""


PARENT = """
import asyncio, sys
from backends.workers.commands import local_worker
from backends.workers.subprocess import SubprocessBackend

async def main():
    command = local_worker(sys.argv[1], dtype="float32", threads=1, max_tokens_per_microbatch=64)
    backend = await SubprocessBackend.start(command, sys.argv[2])
    print(backend.pid, flush=True)
    await asyncio.sleep(600)

asyncio.run(main())
"""


async def test_a_worker_does_not_outlive_its_parent(model_path: Path, tmp_path: Path):
    command = [sys.executable, "-c", PARENT, str(model_path), str(tmp_path / "log")]
    parent = await asyncio.create_subprocess_exec(*command, stdout=PIPE)
    assert parent.stdout is not None
    worker = psutil.Process(int(await parent.stdout.readline()))
    parent.kill()
    await parent.wait()
    assert await asyncio.to_thread(_is_gone, worker, 30.0), "the worker is an orphan"


def _is_gone(process: psutil.Process, within_s: float) -> bool:
    deadline = time.monotonic() + within_s
    while time.monotonic() < deadline:
        try:
            if process.status() == psutil.STATUS_ZOMBIE:
                return True
        except psutil.NoSuchProcess:
            return True
        time.sleep(0.05)
    return False
