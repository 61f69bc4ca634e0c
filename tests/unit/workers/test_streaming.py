"""Samples that are read while they are generated, from a real worker with a tiny model."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from contextlib import aclosing
from pathlib import Path

import numpy as np
import pytest
import pytest_asyncio

from backends.contract import (
    BackendError,
    Failure,
    SampleDelta,
    SampledSequence,
    SampleRequest,
    SampleResult,
    TopkLogprobs,
)
from backends.workers.backlog import Backlog, joined
from backends.workers.commands import local_worker
from backends.workers.subprocess import SubprocessBackend
from tests.tiny_models import tiny_llama, with_tokenizer

pytestmark = pytest.mark.asyncio(loop_scope="module")

Parts = list[SampleDelta | SampleResult | Failure]


async def started(model_path: Path, log_file: Path) -> SubprocessBackend:
    command = local_worker(model_path, dtype="float32", threads=1, max_tokens_per_microbatch=64)
    return await SubprocessBackend.start(command, log_file)


@pytest.fixture(scope="module")
def model_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return with_tokenizer(tiny_llama(tmp_path_factory.mktemp("base")))


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def backend(
    model_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[SubprocessBackend]:
    backend = await started(model_path, tmp_path_factory.mktemp("logs") / "worker.log")
    yield backend
    await backend.stop(5.0)


def question(name: str, max_tokens: int = 12, num_samples: int = 1, k: int = 0) -> SampleRequest:
    return SampleRequest(
        request_id=name,
        prompt=np.arange(5),
        num_samples=num_samples,
        max_tokens=max_tokens,
        topk_sample_logprobs=k,
        seed=7,
    )


async def parts_of(backend: SubprocessBackend, request: SampleRequest, pause_s: float = 0) -> Parts:
    parts: Parts = []
    async for part in backend.stream(request):
        parts.append(part)
        await asyncio.sleep(pause_s)
    return parts


async def _read(stream: AsyncIterator[object]) -> None:
    async for _ in stream:
        pass


def assert_told(sequence: SampledSequence, deltas: list[SampleDelta]) -> None:
    """The deltas hold what the result holds."""
    whole = joined(deltas)
    np.testing.assert_array_equal(whole.tokens, sequence.tokens)
    np.testing.assert_array_equal(whole.logprobs, sequence.logprobs)
    if sequence.topk is not None:
        assert whole.topk is not None
        np.testing.assert_array_equal(whole.topk.token_ids, sequence.topk.token_ids)
        np.testing.assert_array_equal(whole.topk.logprobs, sequence.topk.logprobs)


@pytest.mark.parametrize("pause_s", [0, 0.02])
async def test_deltas_add_up_to_the_result(backend: SubprocessBackend, pause_s: float):
    *deltas, result = await parts_of(backend, question("q", 30, num_samples=3, k=2), pause_s)
    assert isinstance(result, SampleResult)
    alone = await backend.sample(question("alone", 30, num_samples=3, k=2))
    assert isinstance(alone, SampleResult)
    for index, sequence in enumerate(result.sequences):
        own = [d for d in deltas if isinstance(d, SampleDelta) and d.index == index]
        assert_told(sequence, own)
        np.testing.assert_array_equal(alone.sequences[index].tokens, sequence.tokens)


async def test_tokens_come_while_the_rest_is_generated(backend: SubprocessBackend):
    """A sample that began after the first delta is done before the last one."""
    async with aclosing(backend.stream(question("long", 400))) as stream:
        first = await anext(stream)
        assert isinstance(first, SampleDelta)
        assert len(first.tokens) < 100
        assert isinstance(await backend.sample(question("short", 2)), SampleResult)
        async for part in stream:
            last = part
    assert isinstance(last, SampleResult)
    assert len(last.sequences[0].tokens) > 200


async def test_a_reader_that_leaves_cancels_the_request(backend: SubprocessBackend):
    async with aclosing(backend.stream(question("left", 500))) as stream:
        await anext(stream)
    # The id is free again, which it is not while the request runs.
    assert isinstance(await backend.sample(question("left", 1)), SampleResult)
    reader = asyncio.create_task(parts_of(backend, question("cancelled", 500)))
    await asyncio.sleep(0.05)
    reader.cancel()
    with pytest.raises(asyncio.CancelledError):
        await reader
    assert isinstance(await backend.sample(question("cancelled", 1)), SampleResult)


async def test_a_cancelled_request_ends_with_a_failure(backend: SubprocessBackend):
    async with aclosing(backend.stream(question("named", 500))) as stream:
        await anext(stream)
        await backend.cancel("named")
        rest = [part async for part in stream]
    assert rest[-1] == Failure(message="cancelled by the client", category="user")


async def test_a_refused_request_is_only_a_failure(backend: SubprocessBackend):
    (failure,) = await parts_of(backend, question("none", num_samples=0))
    assert isinstance(failure, Failure)
    async with aclosing(backend.stream(question("twice", 500))) as stream:
        await anext(stream)
        with pytest.raises(BackendError, match="under way"):
            await parts_of(backend, question("twice"))


async def test_a_worker_that_dies_ends_the_stream(model_path: Path, tmp_path: Path):
    backend = await started(model_path, tmp_path / "worker.log")
    stream = backend.stream(question("q", 500))
    await anext(stream)
    os.kill(backend.pid, signal.SIGKILL)
    with pytest.raises(BackendError, match="code -9"):
        await _read(stream)


async def test_what_nobody_reads_is_joined():
    backlog = Backlog()
    topk = TopkLogprobs(token_ids=np.zeros((1, 2), np.int32), logprobs=np.zeros((1, 2), np.float32))
    for number in range(1000):
        for index in (1, 0):
            delta = SampleDelta(
                index=index,
                tokens=np.array([number], np.int32),
                logprobs=np.array([-number], np.float32),
                topk=topk,
            )
            backlog.add([delta])
    assert sum(map(len, backlog._deltas.values())) < 200
    await backlog.wait()
    taken = backlog.take()
    assert [delta.index for delta in taken] == [0, 1]
    assert all(delta.tokens.tolist() == list(range(1000)) for delta in taken)
    assert taken[0].topk is not None
    assert taken[0].topk.token_ids.shape == (1000, 2)
    assert backlog.take() == []
