"""`inflight_swap`: what a sample under way does when newer in-flight weights are saved."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import tinker

from tests.e2e.client import MODEL, fresh, sampler_of, sft, text, train, wait
from tests.running_server import RunningServer
from tests.vllm.served import KEY, LONG, ask, check, replicas, tell_all, trained, until


@pytest.fixture
def swapping(
    server: RunningServer, base_path: Path, tmp_path: Path, request: pytest.FixtureRequest
) -> Iterator[RunningServer]:
    """A service of its own on the replicas that run already."""
    options = [word for row in replicas(server) for word in ("--engine-url", row["url"])]
    other = RunningServer(
        tmp_path / "data",
        {MODEL: base_path},
        {"HEARTH_INFLIGHT_SWAP": request.param},
        options=options,
    )
    other.start()
    yield other
    other.interrupt()


@pytest.mark.parametrize(
    ("swapping", "newest"), [("wait", False), ("abort", True)], indirect=["swapping"]
)
def test_a_sample_is_of_one_version_of_the_weights(swapping: RunningServer, newest: bool):
    """The replicas are frozen while newer weights are saved, so the sample is in its middle."""
    with tinker.ServiceClient(base_url=swapping.url, api_key=KEY) as service:
        run = trained(service, 1)
        before = wait(run.save_state(fresh("before")))
        sampler = sampler_of(run, kind="inflight")
        future = ask(sampler, 1)
        until(lambda: sum(row["load"] for row in replicas(swapping)) == 1)
        tell_all(swapping, "pause?mode=keep")
        assert not future.future().done()
        train(run, steps=3, data=[sft(text(2))])
        sampler_of(run, kind="inflight")
        tell_all(swapping, "resume")
        sample = wait(future).sequences[0]
        assert len(sample.tokens) == LONG
        older = wait(service.create_training_client_from_state(before.path))
        check(run if newest else older, text(1), sample)
        check(run, text(3), wait(ask(sampler, 3, 20)).sequences[0])
