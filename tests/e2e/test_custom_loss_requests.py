"""Custom losses without the SDK: retries, limits, and what is left of them after a crash."""

from __future__ import annotations

import json
from typing import Any

import pytest
from tinker.proto import tinker_public_pb2 as pb

from tests.e2e.client import PROTOBUF, Raw, assert_same, pass_body, sft, text
from tests.running_server import RunningServer

TOKENS = text(5, 12)


def body(session: str, seq: int = 0, **change: Any) -> dict[str, Any]:
    nodes = [
        {"op": "placeholder", "name": "logprobs", "target": "logprobs"},
        {"op": "call_method", "name": "s", "target": "sum", "args": [{"ref": "logprobs"}]},
        {"op": "output", "name": "output", "target": "output", "args": [_RESULT]},
    ]
    return {
        "type": "create_custom_loss",
        "session_id": session,
        "custom_loss_seq_id": seq,
        "name": "total",
        "inputs": [{"name": "logprobs", "rank": 1}],
        "graph": {"format": 1, "nodes": nodes},
        **change,
    }


_RESULT = {"tuple": [{"ref": "s"}, {"dict": {"custom/total:sum": {"ref": "s"}}}]}


def with_args(*args: Any) -> dict[str, Any]:
    """A graph whose second node has these arguments."""
    graph = body("")["graph"]
    graph["nodes"][1]["args"] = list(args)
    return graph


def test_a_retry_gets_the_same_loss(raw: Raw) -> None:
    session = raw.session()
    first = raw.promise("create_custom_loss", body(session))
    again = raw.promise("create_custom_loss", body(session, name="other"))
    second = raw.promise("create_custom_loss", body(session, seq=1))
    assert first == again != second
    answer = raw.outcome(first).json()
    assert answer == {"type": "create_custom_loss", "loss_id": answer["loss_id"]}
    assert answer["loss_id"] != raw.outcome(second).json()["loss_id"]


def test_a_refused_loss_stays_refused(raw: Raw) -> None:
    session = raw.session()
    for graph in (with_args("text"), body("")["graph"]):
        request = raw.promise("create_custom_loss", body(session, graph=graph))
        answer = raw.outcome(request).json()
        assert answer["category"] == "user"
        assert "'s'" in answer["error"]


def deep(levels: int) -> Any:
    value: Any = 1
    for _ in range(levels):
        value = [value]
    return value


@pytest.mark.parametrize(
    "graph",
    [
        with_args({"ref": "s"}),
        with_args(10**40),
        with_args(deep(100)),
        with_args({"ref": "\ud800"}),
        with_args({"ref": "logprobs"}, {"float": "1e999"}),
    ],
)
def test_a_graph_that_cannot_be_read_is_a_mistake_of_its_user(raw: Raw, graph: Any) -> None:
    answer = raw.post("create_custom_loss", json.dumps(body(raw.session(), graph=graph)).encode())
    if answer.status_code == 200:
        answer = raw.outcome(answer.json()["request_id"])
        assert answer.json()["category"] == "user"
    else:
        assert answer.status_code == 400


def test_a_body_beyond_the_limits_is_refused(raw: Raw) -> None:
    session = raw.session()
    huge = body(session, name="n" * 2_000_000)
    assert raw.post("create_custom_loss", huge).status_code == 413
    many = [{"name": f"i{index}", "rank": 1} for index in range(17)]
    assert raw.post("create_custom_loss", body(session, inputs=many)).status_code == 400
    assert raw.post("create_custom_loss", body(session, seq=-1)).status_code == 400
    assert raw.post("create_custom_loss", body("session-nowhere")).status_code == 404


def test_another_tenants_session_takes_no_loss(raw: Raw, server: RunningServer) -> None:
    other = Raw(server.url, server.keys["bob"])
    assert other.post("create_custom_loss", body(raw.session())).status_code == 404


def custom_pass(run: str, seq: int, loss_id: str) -> bytes:
    message = pb.ForwardBackwardRequest()
    message.ParseFromString(pass_body(run, seq, [sft(TOKENS)], loss="custom"))
    message.loss_fn_config_v2["loss_id"].text = loss_id
    return message.SerializeToString()


def steps(raw: Raw, run: str, loss_id: str, seqs: range) -> None:
    for seq in seqs:
        passed = raw.promise(
            "forward_backward", custom_pass(run, 2 * seq + 1, loss_id), headers=PROTOBUF
        )
        stepped = raw.optim_step(run, 2 * seq + 2)
        for request in (passed, stepped):
            answer = raw.outcome(request)
            assert b"category" not in answer.content, answer.content


def test_a_loss_outlasts_a_crash(own_server: RunningServer) -> None:
    """What was computed with it is computed again, and it can be used as before."""
    raw = Raw(own_server.url, "")
    session = raw.session()
    request = raw.promise("create_custom_loss", body(session))
    loss_id = raw.outcome(request).json()["loss_id"]
    runs = [_run_of(raw, session, number) for number in range(2)]
    steps(raw, runs[0], loss_id, range(4))
    steps(raw, runs[1], loss_id, range(2))
    own_server.kill()
    own_server.start()
    steps(raw, runs[1], loss_id, range(2, 4))
    assert raw.outcome(request).json()["loss_id"] == loss_id
    assert_same(raw.logprobs(runs[0], 20), raw.logprobs(runs[1], 20), 1e-6)


def _run_of(raw: Raw, session: str, number: int) -> str:
    request = {
        "session_id": session,
        "model_seq_id": number,
        "base_model": "tiny/llama",
        "lora_config": {"rank": 8, "seed": 1},
    }
    return raw.outcome(raw.promise("create_model", request)).json()["model_id"]
