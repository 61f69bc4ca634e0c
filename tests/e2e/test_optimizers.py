"""Which optimizer a run has: told, kept with its checkpoints, and not to be exchanged."""

from __future__ import annotations

from typing import Any

import pytest
import tinker
from tinker import types

from tests.e2e.client import DATA, MODEL, Raw, adam, fresh, leaves_untouched, new_run, refused, wait
from tests.running_server import RunningServer

DIMUON = types.DimuonOptimizerConfig()


def test_a_run_and_its_checkpoint_tell_their_optimizer(
    service: tinker.ServiceClient, rest: tinker.RestClient
) -> None:
    run = new_run(service)
    assert run.get_info().optimizer_config == types.AdamOptimizerConfig()
    saved = wait(run.save_state(fresh()))
    info = wait(rest.get_weights_info_by_tinker_path(saved.path))
    assert info.optimizer_config == types.AdamOptimizerConfig()
    for made in (
        service.create_training_client_from_state_with_optimizer(saved.path),
        service.create_training_client_from_state(
            saved.path, optimizer=types.AdamOptimizerConfig()
        ),
        service.create_training_client_from_state(saved.path),
    ):
        assert wait(made).get_info().optimizer_config == types.AdamOptimizerConfig()


def test_another_optimizer_is_refused_when_a_run_is_made(service: tinker.ServiceClient) -> None:
    with refused("dimuon", "adamw", "not published"):
        new_run(service, optimizer=DIMUON)
    saved = wait(new_run(service).save_state(fresh()))
    with refused("dimuon", "adamw", "not published"):
        wait(service.create_training_client_from_state(saved.path, optimizer=DIMUON))


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"type": "sgd"}, ("optimizer_config.type", "'sgd'", "adamw")),
        ({"type": "dimuon", "version": 2}, ("optimizer_config.version", "2", "1")),
        ({"type": "adamw", "version": 3}, ("optimizer_config.version", "3")),
        ({"type": 5}, ("optimizer_config.type", "5")),
    ],
)
def test_kinds_and_versions_nobody_knows_are_refused(
    raw: Raw, config: dict[str, Any], words: tuple[str, ...]
) -> None:
    base = {"session_id": raw.session(), "model_seq_id": 0, "optimizer_config": config}
    create = {**base, "base_model": MODEL, "lora_config": {"rank": 4}}
    path = raw_checkpoint(raw)
    load = {**base, "model_seq_id": 1, "path": path, "optimizer": True}
    for endpoint, body in (("create_model", create), ("load_weights", load)):
        answer = raw.post(endpoint, body)
        assert answer.status_code == 400
        for word in words:
            assert word in answer.text


def raw_checkpoint(raw: Raw) -> str:
    request = raw.promise("save_weights", {"model_id": raw.run(), "seq_id": 1, "path": fresh()})
    return raw.outcome(request).json()["path"]


def test_steps_of_another_optimizer_are_refused_and_leave_the_gradient_alone(
    own_server: RunningServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TINKER_API_KEY", "tml-me")
    run = new_run(tinker.ServiceClient(base_url=own_server.url))
    with leaves_untouched(run), refused("dimuon", "adamw"):
        wait(run.optim_step(types.DimuonParams(learning_rate=1e-2)))
    wait(run.forward_backward(DATA, "cross_entropy"))
    wait(run.optim_step(adam()))
