"""Which optimizer a run gets, and what is refused with which words."""

from __future__ import annotations

import pytest

from server.core.errors import BadInput
from server.core.ids import RunId, TenantId
from server.core.optimizers import ADAMW, Optimizer
from server.core.paths import CheckpointKind
from server.core.records import Checkpoint
from server.runs.optimizers import chosen, resumed
from server.runs.wire import OptimizerConfig
from tests.unit.store.material import SHAPE

DIMUON = Optimizer(type="dimuon", version=1)


def checkpoint(optimizer: Optimizer = ADAMW) -> Checkpoint:
    return Checkpoint(
        run_id=RunId("run"),
        kind=CheckpointKind.TRAINING,
        name="a",
        owner=TenantId("me"),
        project="default",
        base_model="tiny/fake",
        lora=SHAPE,
        folder="f",
        size_bytes=1,
        created_at=0.0,
        optimizer=optimizer,
    )


def test_adamw_is_what_nobody_chose() -> None:
    assert chosen(None) == chosen(OptimizerConfig()) == ADAMW


@pytest.mark.parametrize(
    ("config", "words"),
    [
        (OptimizerConfig(type="dimuon", version=1), ("'dimuon'", "adamw", "not published")),
        (OptimizerConfig(type="dimuon"), ("'dimuon'", "not published")),
        (OptimizerConfig(type="dimuon", version=2), ("version", "2", "only version", "1")),
        (OptimizerConfig(type="adamw", version=1), ("version", "adamw has no versions")),
        (OptimizerConfig(type="sgd"), ("type", "'sgd'", "available is adamw")),
    ],
)
def test_others_are_refused(config: OptimizerConfig, words: tuple[str, ...]) -> None:
    for use in (chosen, lambda c: resumed(checkpoint(), with_state=False, config=c)):
        with pytest.raises(BadInput) as caught:
            use(config)
        for word in words:
            assert word in str(caught.value)


def test_a_resumed_run_keeps_the_optimizer_whose_state_it_takes_over() -> None:
    assert resumed(checkpoint(DIMUON), with_state=True, config=None) == DIMUON
    assert resumed(checkpoint(), with_state=True, config=OptimizerConfig()) == ADAMW
    with pytest.raises(BadInput, match=r"is adamw; .*holds the state of dimuon version 1"):
        resumed(checkpoint(DIMUON), with_state=True, config=OptimizerConfig())


def test_a_run_that_takes_weights_alone_is_free() -> None:
    assert resumed(checkpoint(DIMUON), with_state=False, config=None) == ADAMW


def test_the_json_is_the_sdks() -> None:
    assert ADAMW.as_json() == {"type": "adamw"}
    assert DIMUON.as_json() == {"type": "dimuon", "version": 1}
