"""Real groups of two ranks with a tiny model, which all of them hold whole (`rehearsed.py`)."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import time
from collections.abc import AsyncIterator
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest
import pytest_asyncio

from backends.contract import (
    BackendError,
    CustomLoss,
    LossResult,
    SampleRequest,
)
from backends.workers.commands import local_worker
from backends.workers.subprocess import SubprocessBackend
from tests.tiny_models import VOCAB_SIZE, tiny_llama, with_tokenizer
from tests.unit.workers.groups import COMMON, SPEC, Group, trained, work

pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest.fixture(scope="module")
def model_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return with_tokenizer(tiny_llama(tmp_path_factory.mktemp("base")))


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def shared(
    model_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[Group]:
    """For the tests that leave it whole."""
    group = await Group.start(model_path, tmp_path_factory.mktemp("logs"))
    yield group
    await group.backend.stop(5.0)
    assert group.log.read_text().splitlines()[-1].endswith("stopped")
    assert await group.ended()


@pytest_asyncio.fixture(loop_scope="module")
async def mortal(model_path: Path, tmp_path: Path) -> AsyncIterator[Group]:
    group = await Group.start(model_path, tmp_path)
    yield group
    await group.backend.stop(0.0)
    assert await group.ended(), "an orphan"


async def test_it_answers_what_one_process_does(shared: Group, model_path: Path, tmp_path: Path):
    backend = shared.backend
    alone = await SubprocessBackend.start(local_worker(model_path, **COMMON), tmp_path / "log")
    assert await backend.describe() == await alone.describe()
    assert await trained(backend, "r") == pytest.approx(await trained(alone, "r"), rel=1e-5)
    folder = str(tmp_path / "saved")
    assert await backend.save("r", folder, "optimizer") > 1000
    assert await alone.load("copy", folder, "optimizer") == SPEC
    assert await backend.load("copy", folder, "optimizer") == SPEC
    assert set((await backend.memory()).runs) == {"r", "copy"}
    await backend.unload("copy")
    assert set((await backend.memory()).runs) == {"r"}
    refusal = await backend.check_loss(CustomLoss(name="none", inputs=(), nodes=()))
    assert refusal == await alone.check_loss(CustomLoss(name="none", inputs=(), nodes=()))
    await alone.stop(5.0)


async def test_calls_may_be_queued(shared: Group):
    await shared.backend.create("q", SPEC)
    calls = [shared.backend.forward_backward([work("q")]) for _ in range(3)]
    results = [result for (result,) in await asyncio.gather(*calls)]
    assert all(isinstance(result, LossResult) for result in results)


async def test_it_does_not_sample(shared: Group):
    request = SampleRequest(request_id="a", prompt=np.arange(3), num_samples=1, max_tokens=1)
    with pytest.raises(BackendError, match="only trains"):
        await shared.backend.sample(request)


async def test_a_call_that_breaks_in_all_ranks_breaks_alone(shared: Group, tmp_path: Path):
    with pytest.raises(BackendError, match="as rehearsed, in rank 0"):
        await shared.backend.forward_backward([work("all-break")])
    with pytest.raises(BackendError, match="nowhere"):
        await shared.backend.load("x", str(tmp_path / "nowhere"), "adapter")
    with pytest.raises(BackendError, match="not loaded"):
        await shared.backend.save("unknown", str(tmp_path / "x"), "adapter")
    assert not shared.backend.closed
    await trained(shared.backend, "after")


async def test_the_ranks_log_under_their_names(shared: Group):
    lines = shared.log.read_text().splitlines()
    for rank in (0, 1):
        assert any(re.match(rf"rank {rank}: .*INFO loaded", line) for line in lines)


async def test_ctrl_c_in_the_terminal_is_not_for_the_group(shared: Group):
    for process in shared.processes:
        process.send_signal(signal.SIGINT)
    assert (await shared.backend.describe()).vocab_size == VOCAB_SIZE


async def test_a_rank_that_is_killed_fails_the_call_under_way(mortal: Group):
    await mortal.backend.create("r", SPEC)
    with pytest.raises(BackendError, match=r"rank 1 ended with code -9 during RunForwardBackward"):
        await mortal.backend.forward_backward([work("one-dies")])
    assert mortal.backend.closed
    assert "rank 1 ended with code -9" in mortal.log.read_text().splitlines()[-1]
    assert await mortal.ended()


async def test_ranks_that_do_not_agree_are_ended(mortal: Group):
    """One breaks, and the other waits for it in a collective."""
    began = time.monotonic()
    with pytest.raises(BackendError, match=r"rank 1 broke: as rehearsed.*not answered by all"):
        await mortal.backend.forward_backward([work("one-breaks")])
    assert time.monotonic() - began > 5, "it was given time"
    assert await mortal.ended()


@pytest.mark.parametrize("end", ["service", "coordinator"])
async def test_nobody_outlives_the_coordinator_or_the_service(mortal: Group, end: str):
    """In the middle of a collective that never ends."""
    await mortal.backend.create("r", SPEC)
    call = asyncio.create_task(mortal.backend.forward_backward([work("one-hangs")]))
    await asyncio.sleep(0.5)
    if end == "service":
        await mortal.backend._connection.fail(BackendError("the service is gone"))
    else:
        os.kill(mortal.backend.pid, signal.SIGKILL)
    assert await mortal.ended()
    with suppress(BackendError):
        await call


async def test_a_group_that_cannot_start_says_why(model_path: Path, tmp_path: Path):
    with pytest.raises(BackendError, match=r"cannot be divided as \{'tensor_parallel': 2"):
        await Group.start(model_path, tmp_path, layout={"tensor_parallel": 2})
    assert re.search(r"rank [01] ended with code 1 during loading", _last_line(tmp_path))


def _last_line(folder: Path) -> str:
    return (folder / "group.log").read_text().splitlines()[-1]
