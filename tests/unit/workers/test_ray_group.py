"""Groups whose ranks are Ray actors: in a cluster of the group's own, and in one that is there."""

from __future__ import annotations

import asyncio
import re
import sys
from asyncio.subprocess import PIPE
from collections.abc import AsyncIterator
from pathlib import Path

import psutil
import pytest
import pytest_asyncio

from backends.contract import BackendError
from backends.workers.commands import local_worker
from backends.workers.subprocess import SubprocessBackend
from tests.tiny_models import tiny_llama, with_tokenizer
from tests.unit.workers.groups import COMMON, SPEC, Group, trained, work

pytestmark = pytest.mark.asyncio(loop_scope="module")

CLUSTER = """
import backends.workers.ray_ranks, ray, sys
own = {"include_dashboard": False, "_node_ip_address": "127.0.0.1"}
print(ray.init("local", num_cpus=4, **own).address_info["gcs_address"], flush=True)
sys.stdin.read()
"""


@pytest.fixture(scope="module")
def model_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return with_tokenizer(tiny_llama(tmp_path_factory.mktemp("base")))


@pytest_asyncio.fixture(loop_scope="module")
async def cluster(
    monkeypatch: pytest.MonkeyPatch,
) -> AsyncIterator[tuple[str, psutil.Process]]:
    """Its address, and the process that ends it."""
    monkeypatch.setenv("RAY_AUTH_MODE", "token")
    command = sys.executable, "-c", CLUSTER
    process = await asyncio.create_subprocess_exec(*command, stdin=PIPE, stdout=PIPE)
    assert process.stdin is not None
    assert process.stdout is not None
    yield (await process.stdout.readline()).decode().strip(), psutil.Process(process.pid)
    process.stdin.close()
    await process.wait()


async def test_it_answers_what_one_process_does_and_nothing_outlives_it(
    model_path: Path, tmp_path: Path
):
    """The coordinator is killed while the ranks are in a collective that never ends."""
    group = await Group.start(model_path, tmp_path, ray="local")
    alone = await SubprocessBackend.start(local_worker(model_path, **COMMON), tmp_path / "log")
    losses = await trained(group.backend, "r")
    assert losses == pytest.approx(await trained(alone, "r"), rel=1e-5)
    await alone.stop(5.0)
    lines = group.log.read_text().splitlines()
    for rank in (0, 1):
        assert any(re.match(rf"\(rank {rank} pid=\d+\) .*INFO loaded", line) for line in lines)
    call = asyncio.create_task(group.backend.forward_backward([work("one-hangs")]))
    await asyncio.sleep(0.5)
    psutil.Process(group.backend.pid).kill()
    with pytest.raises(BackendError, match="code -9"):
        await call
    assert await group.ended(), "an orphan, of the group or of Ray"


async def test_a_rank_that_dies_ends_the_others_and_leaves_the_cluster(
    model_path: Path, tmp_path: Path, cluster: tuple[str, psutil.Process]
):
    address, owner = cluster
    group = await Group.start(model_path, tmp_path, ray=address)
    ranks = [
        process
        for process in owner.children(recursive=True)
        if "RankActor" in " ".join(process.cmdline())
    ]
    assert len(ranks) == 2
    await group.backend.create("r", SPEC)
    with pytest.raises(BackendError, match=r"rank 1 failed.*during RunForwardBackward"):
        await group.backend.forward_backward([work("one-dies")])
    assert "rank 1 failed" in group.log.read_text().splitlines()[-1]
    _, alive = await asyncio.to_thread(psutil.wait_procs, ranks, timeout=30)
    assert not alive
    assert await group.ended()
    assert owner.is_running()
