"""What no SDK sends: broken bodies, bombs, foreign encodings, strange ids. Each is answered at
once with a 4xx that has a body, and the server and its runs go on. Issue 2 item 9."""

from __future__ import annotations

import contextlib
import itertools
import json
import time
import zlib
from collections.abc import Iterator
from typing import Any

import httpx2
import numpy as np
import pytest
import zstandard
from tinker.proto import tinker_public_pb2 as pb

from tests.e2e.client import MODEL, PROTOBUF, Raw, assert_same, pass_body, prompt, text
from tests.e2e.conftest import MAX_BODY_BYTES
from tests.running_server import RunningServer

AT_ONCE_S = 3.0
HUGE_INTEGER = "9" * 5000


@pytest.fixture(scope="module")
def run(raw: Raw) -> str:
    """With a gradient that waits; only `test_the_run_survived_it_all` steps."""
    run = raw.run(seed=5)
    raw.outcome(raw.forward_backward(run, 1))
    return run


def refused(answer: Any, *words: str, status: int = 400) -> None:
    """A refusal that the SDK raises at once and can show to its user."""
    assert answer.status_code == status, (answer.status_code, answer.text[:500])
    body = answer.json()
    assert body["detail"]
    assert body["category"] == "user"
    assert answer.headers["x-should-retry"] == "false"
    for word in words:
        assert word in body["detail"], body


ZSTD = {**PROTOBUF, "content-encoding": "zstd"}


BROKEN_PROTOBUF = {
    "random bytes": bytes(range(256)) * 4,
    "one byte": b"\x0a",
    "text": b"hello",
    "a length that runs over the end": b"\x0a\xff\xff\xff\xff\x0f",
    "nothing": b"",
    "json": b'{"model_id": "x", "seq_id": 1}',
}


@pytest.mark.parametrize("kind", BROKEN_PROTOBUF)
def test_a_body_that_is_no_protobuf_is_refused(raw: Raw, run: str, kind: str) -> None:
    refused(raw.post("forward_backward", BROKEN_PROTOBUF[kind], headers=PROTOBUF))


def test_a_cut_protobuf_is_refused(raw: Raw, run: str) -> None:
    whole = pass_body(run, 1000)
    refused(raw.post("forward_backward", whole[: len(whole) // 2], headers=PROTOBUF))


@pytest.mark.parametrize("seq", [0, -1, -(2**31)])
def test_a_seq_id_below_one_is_refused(raw: Raw, run: str, seq: int) -> None:
    refused(raw.post("forward_backward", pass_body(run, seq), headers=PROTOBUF), "seq_id")


def _tensor(**fields: Any) -> bytes:
    message = pb.ForwardBackwardRequest(model_id="", seq_id=1, loss_fn="cross_entropy")
    datum = message.data.add()
    datum.model_input.add().encoded_text.tokens = np.array([65, 66], "<i4").tobytes()
    tensor = datum.loss_fn_inputs["target_tokens"]
    for name, value in fields.items():
        if name == "shape":
            tensor.shape.extend(value)
        elif name == "sparse":
            for part, array in value.items():
                setattr(tensor.sparse_csr, part, array)
        else:
            setattr(tensor, name, value)
    return message.SerializeToString()


INT64 = np.dtype("<i8")
TWO = np.array([65, 66], INT64).tobytes()
BROKEN_TENSORS = {
    "a dtype that does not exist": _tensor(dense=TWO, dtype=9, shape=[2]),
    "no dtype": _tensor(dense=TWO, shape=[2]),
    "half a number": _tensor(dense=TWO[:-1], dtype=2, shape=[2]),
    "a shape that does not fit": _tensor(dense=TWO, dtype=2, shape=[3]),
    "a negative shape": _tensor(dense=TWO, dtype=2, shape=[-2]),
    "a shape beyond all memory": _tensor(dense=b"", dtype=2, shape=[2**40, 2**20]),
    "sparse rows that fall": _tensor(
        dtype=2,
        shape=[2, 4],
        sparse={
            "values": TWO,
            "crow_indices": np.array([0, 5, 2], INT64).tobytes(),
            "col_indices": np.array([0, 1], INT64).tobytes(),
        },
    ),
    "a sparse column outside": _tensor(
        dtype=2,
        shape=[2, 4],
        sparse={
            "values": TWO,
            "crow_indices": np.array([0, 1, 2], INT64).tobytes(),
            "col_indices": np.array([0, 400], INT64).tobytes(),
        },
    ),
    "a sparse tensor that unpacks to a terabyte": _tensor(
        dtype=2,
        shape=[2**33, 64],
        sparse={
            "values": b"",
            "crow_indices": np.array([0, 0], INT64).tobytes(),
            "col_indices": b"",
        },
    ),
}


@pytest.mark.parametrize("kind", BROKEN_TENSORS)
def test_a_tensor_that_contradicts_itself_fails_its_request(raw: Raw, run: str, kind: str) -> None:
    """The envelope can be read, so its number is used up, and the future says why."""
    message = pb.ForwardBackwardRequest()
    message.ParseFromString(BROKEN_TENSORS[kind])
    message.model_id, message.seq_id = run, _next_seq()
    answer = raw.outcome(
        raw.promise("forward_backward", message.SerializeToString(), headers=PROTOBUF)
    )
    assert answer.json()["category"] == "user"
    assert "target_tokens" in answer.json()["error"]


_seqs = itertools.count(2)


def _next_seq() -> int:
    return next(_seqs)


def test_an_empty_batch_fails_its_request(raw: Raw, run: str) -> None:
    """The SDK does not send one."""
    seq = _next_seq()
    answer = raw.outcome(raw.forward_backward(run, seq, []))
    assert answer.json()["category"] == "user"
    assert "at least 1" in answer.json()["error"]


def test_a_body_that_is_no_zstd_is_refused(raw: Raw, run: str) -> None:
    refused(raw.post("forward_backward", b"not zstd at all", headers=ZSTD), "zstd")


def test_a_cut_zstd_is_refused(raw: Raw, run: str) -> None:
    packed = zstandard.compress(pass_body(run, 1000))
    refused(raw.post("forward_backward", packed[:-5], headers=ZSTD), "zstd")


def test_zstd_with_something_behind_it_is_refused(raw: Raw, run: str) -> None:
    packed = zstandard.compress(pass_body(run, 1000)) + b"more"
    refused(raw.post("forward_backward", packed, headers=ZSTD))


@pytest.mark.parametrize("sized", [True, False])
def test_a_zstd_bomb_is_refused_before_it_unpacks(raw: Raw, run: str, sized: bool) -> None:
    """A few kB that unpack to 512 MiB."""
    packer = zstandard.ZstdCompressor(level=1, write_content_size=sized).compressobj(
        **({"size": 2**29} if sized else {})
    )
    block = bytes(2**24)
    packed = b"".join(packer.compress(block) for _ in range(2**5)) + packer.flush()
    assert len(packed) < 100_000
    started = time.monotonic()
    answer = raw.post("forward_backward", packed, headers=ZSTD)
    refused(answer, str(MAX_BODY_BYTES), status=413)
    assert time.monotonic() - started < AT_ONCE_S


def test_a_gzip_bomb_is_refused_before_it_unpacks(raw: Raw) -> None:
    packer = zlib.compressobj(9, zlib.DEFLATED, 31)
    packed = b"".join(packer.compress(bytes(2**24)) for _ in range(8)) + packer.flush()
    headers = {"content-type": "application/json", "content-encoding": "gzip"}
    refused(raw.post("asample", packed, headers=headers), status=413)


def test_an_unknown_encoding_is_refused(raw: Raw, run: str) -> None:
    headers = {**PROTOBUF, "content-encoding": "br"}
    refused(raw.post("forward_backward", pass_body(run, 1000), headers=headers), "br")


def test_zstd_works(raw: Raw) -> None:
    plain, packed = raw.run(), raw.run()
    raw.forward_backward(plain, 1)
    body = zstandard.compress(pass_body(packed, 1))
    raw.promise("forward_backward", body, headers=ZSTD)
    metrics = [raw.outcome(raw.optim_step(one, 2)).json()["metrics"] for one in (plain, packed)]
    assert metrics[0] == metrics[1]


def test_a_body_above_the_limit_is_refused(raw: Raw) -> None:
    answer = raw.post("asample", b" " * (MAX_BODY_BYTES + 1))
    refused(answer, str(MAX_BODY_BYTES), status=413)


def test_a_body_without_a_length_stops_at_the_limit(raw: Raw) -> None:
    def endless() -> Iterator[bytes]:
        for _ in range(2 * MAX_BODY_BYTES // 2**20):
            yield bytes(2**20)

    # The server may close the connection while the client is still sending.
    with contextlib.suppress(httpx2.NetworkError, httpx2.RemoteProtocolError):
        refused(raw.http.post("asample", content=endless()), status=413)
    assert raw.get("healthz").is_success


POSTS = [
    "create_session",
    "session_heartbeat",
    "create_model",
    "load_weights",
    "get_info",
    "optim_step",
    "save_weights",
    "save_weights_for_sampler",
    "save_weights_external",
    "create_sampling_session",
    "join_sampling_session",
    "asample",
    "retrieve_future",
    "retrieve_futures",
    "cancel_future",
    "weights_info",
    "copy_weights",
]
BROKEN_JSON = {
    "nothing": b"",
    "half an object": b'{"session_id": ',
    "a list": b"[]",
    "a number": b"3",
    "null": b"null",
    "no utf-8": b'{"session_id": "\xff\xfe"}',
    "a lone surrogate": b'{"session_id": "\\ud800", "model_id": "\\ud800"}',
    "deep nesting": b"[" * 100_000,
    "a huge integer": b'{"session_id": "x", "seq_id": ' + HUGE_INTEGER.encode() + b"}",
    "wrong types": b'{"session_id": 1, "model_id": [], "tags": 3, "request_id": {}}',
    "NaN": b'{"session_id": NaN, "seq_id": NaN, "model_id": NaN, "request_id": NaN, "tags": NaN}',
}


@pytest.mark.parametrize("path", POSTS)
def test_a_body_that_is_not_the_json_it_should_be_is_refused(raw: Raw, path: str) -> None:
    for body in BROKEN_JSON.values():
        answer = raw.post(path, body)
        assert 400 <= answer.status_code < 500, (body[:80], answer.status_code, answer.text)
        assert answer.status_code not in (408, 409, 429)
        assert answer.json()["detail"]


def test_an_unknown_field_is_ignored(raw: Raw) -> None:
    """public-reports G82"""
    body = {"tags": [], "sdk_version": "9.9", "made_up": {"deeply": ["nested"]}}
    session = raw.post("create_session", body).json()["session_id"]
    body = {
        "session_id": session,
        "model_seq_id": 0,
        "base_model": MODEL,
        "lora_config": {"rank": 2, "made_up": 1},
        "made_up": True,
    }
    assert "model_id" in raw.outcome(raw.promise("create_model", body)).json()


@pytest.mark.parametrize(
    "id_",
    ["", "x", "../../etc/passwd", "a\x00b", "new\nline", "🔥", "%2e%2e", "x" * 100_000, "'; --"],
)
def test_a_strange_id_is_one_that_does_not_exist(raw: Raw, id_: str) -> None:
    targets: dict[str, dict[str, Any]] = {
        "get_info": {"model_id": id_},
        "optim_step": {"model_id": id_, "seq_id": 1},
        "save_weights": {"model_id": id_, "seq_id": 1, "path": "name"},
        "session_heartbeat": {"session_id": id_},
        "create_model": {"session_id": id_, "model_seq_id": 0, "base_model": MODEL},
        "join_sampling_session": {"sampling_session_id": id_},
        "retrieve_future": {"request_id": id_},
        "cancel_future": {"request_id": id_},
        "retrieve_futures": {"target": {"sampling_session_id": id_}},
        "asample": {
            "sampling_session_id": id_,
            "seq_id": 0,
            "prompt": {"chunks": [{"tokens": [65]}]},
        },
    }
    for path, body in targets.items():
        refused(raw.post(path, body), status=404)


@pytest.mark.parametrize(
    ("path", "params"),
    [
        ("training_runs", {"limit": 0}),
        ("training_runs", {"limit": 10**30}),
        ("training_runs", {"offset": -1}),
        ("training_runs", {"offset": 10**30}),
        ("checkpoints", {"offset": 2**63}),
        ("checkpoints", {"limit": "many"}),
        ("sessions", {"offset": 2**70}),
    ],
)
def test_a_page_out_of_bounds_is_refused(raw: Raw, path: str, params: dict[str, Any]) -> None:
    refused(raw.get(path, params=params))


@pytest.mark.parametrize(
    ("path", "field", "value"),
    [
        ("retrieve_futures", "prev_cursor", 2**70),
        ("retrieve_futures", "prev_cursor", -1),
        ("retrieve_futures", "timeout", "soon"),
        ("asample", "seq_id", 2**63),
        ("asample", "seq_id", -1),
        ("asample", "num_samples", 2**70),
        ("create_sampling_session", "sampling_session_seq_id", -1),
        ("create_sampling_session", "sampling_session_seq_id", 10**400),
    ],
)
def test_a_number_out_of_bounds_is_refused(raw: Raw, path: str, field: str, value: Any) -> None:
    session = raw.session()
    sampler = _sampler(raw, session)
    bodies: dict[str, dict[str, Any]] = {
        "retrieve_futures": {"target": {"sampling_session_id": sampler}, "timeout": 0},
        "asample": {
            "sampling_session_id": sampler,
            "seq_id": 0,
            "prompt": {"chunks": [{"tokens": [65]}]},
            "sampling_params": {"max_tokens": 1},
        },
        "create_sampling_session": {"session_id": session, "base_model": MODEL},
    }
    refused(raw.post(path, {**bodies[path], field: value}), field)


def test_a_clone_number_out_of_bounds_is_refused(raw: Raw) -> None:
    target = {"sampling_session_id": _sampler(raw, raw.session()), "cloned_sampler_id": 2**62}
    refused(raw.post("retrieve_futures", {"target": target, "timeout": 0}), "cloned_sampler_id")


@pytest.mark.parametrize("seconds", ["NaN", "-1", "Infinity", "1e400"])
def test_an_impossible_poll_time_does_not_hang(raw: Raw, seconds: str) -> None:
    """The poll is refused, or is as long as the longest; others go on meanwhile."""
    sampler = _sampler(raw, raw.session())
    target = json.dumps({"sampling_session_id": sampler})
    body = f'{{"target": {target}, "timeout": {seconds}}}'.encode()
    if seconds in ("NaN", "-1"):
        assert raw.post("retrieve_futures", body).status_code in (200, 400)
    assert raw.get("healthz").json() == {"status": "ok"}


def _sampler(raw: Raw, session: str) -> str:
    body = {"session_id": session, "sampling_session_seq_id": 0, "base_model": MODEL}
    return raw.post("create_sampling_session", body).json()["sampling_session_id"]


@pytest.mark.parametrize("seed", [2**63 + 5, -1, 2**200])
def test_any_integer_is_a_seed(raw: Raw, seed: int) -> None:
    """Protocol 9.2: any Python int; the same one repeats."""
    tokens = prompt(text(1)).to_ints()
    answers = []
    for sampler in (_sampler(raw, raw.session()), _sampler(raw, raw.session())):
        body = {
            "sampling_session_id": sampler,
            "seq_id": 0,
            "num_samples": 1,
            "prompt": {"chunks": [{"type": "encoded_text", "tokens": tokens}]},
            "sampling_params": {"max_tokens": 8, "seed": seed},
        }
        response = pb.SampleResponse()
        response.ParseFromString(raw.outcome(raw.promise("asample", body)).content)
        answers.append(response.sequences[0].tokens)
    assert answers[0] == answers[1]


@pytest.mark.parametrize(
    "path",
    [
        "training_runs/%00",
        "training_runs/..%2f..%2fetc",
        "training_runs/x/checkpoints/weights/%2e%2e",
        "training_runs/x/checkpoints/nonsense/name",
        "samplers/%0a",
        "sessions/%F0%9F%94%A5",
        "files/../hearth.db?expires=1&signature=x",
        "files/%2e%2e/hearth.db?expires=1&signature=x",
        "files/x/..%2f..%2fhearth.db?expires=1&signature=x",
        "files/x/y?expires=99999999999999999999999999&signature=%C3%A9",
        "files/x/y",
        "no_such_endpoint",
    ],
)
def test_a_strange_url_is_refused(raw: Raw, path: str) -> None:
    for method in ("GET", "DELETE"):
        answer = raw.http.request(method, path)
        assert answer.status_code in (400, 404, 405), (method, answer.status_code, answer.text)
        assert answer.content


def test_a_request_on_a_run_that_only_failed_to_start_is_refused(raw: Raw) -> None:
    """A run whose checkpoint went away before it was loaded has no weights to train."""
    source = raw.run()
    name = {"model_id": source, "seq_id": 1, "path": "short-lived"}
    path = raw.outcome(raw.promise("save_weights", name)).json()["path"]
    assert raw.http.delete(f"training_runs/{source}/checkpoints/weights/short-lived").is_success
    body = {"session_id": raw.session(), "model_seq_id": 0, "path": path, "optimizer": False}
    refused(raw.post("load_weights", body), "does not exist", status=404)


def test_the_run_survived_it_all(raw: Raw, run: str, server: RunningServer) -> None:
    """Its gradient is the one of its first request alone."""
    twin = raw.run(seed=5)
    raw.forward_backward(twin, 1)
    last = _next_seq()
    metrics = [
        raw.outcome(raw.optim_step(one, seq)).json()["metrics"]
        for one, seq in ((run, last), (twin, 2))
    ]
    assert metrics[0] == metrics[1]
    assert_same(raw.logprobs(run, last + 1), raw.logprobs(twin, 3), 1e-5)
    assert not [line for line in server.log.read_text().splitlines() if "request_failed" in line]
