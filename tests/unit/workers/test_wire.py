from __future__ import annotations

import socket

import msgspec
import numpy as np
import pytest
from msgspec import Struct

from backends.contract import (
    AdapterSpec,
    Datum,
    Failure,
    ForwardBackward,
    LossResult,
    SampledSequence,
    SampleRequest,
    SampleResult,
    TopkLogprobs,
)
from backends.workers import messages
from backends.workers.messages import Call, Reply
from backends.workers.wire import (
    HEADER,
    Channel,
    Decoder,
    MalformedFrameError,
    encode,
    new_body,
    packed,
    unpacked,
)

SPEC = AdapterSpec(rank=4, alpha=8.0, seed=1, train_attn=True, train_mlp=True, train_unembed=False)


def carried(message: object, message_type: object = Call) -> object:
    """What arrives when a message is sent."""
    frame = b"".join(encode(7, message))
    header, body = new_body(frame[: HEADER.size])
    assert header.call_id == 7
    body[:] = np.frombuffer(frame[HEADER.size :], np.uint8)
    return Decoder(message_type).decode(header, body)


@pytest.mark.parametrize(
    "array",
    [
        np.arange(5),
        np.array([[0.5, np.nan], [-np.inf, 1e-30]], np.float32),
        np.zeros((0, 3), np.int32),
        np.arange(24).reshape(2, 3, 4)[:, ::2],
        np.array([True, False]),
        np.random.default_rng(0).normal(size=(300, 300)),
    ],
)
def test_arrays_arrive_as_they_were_and_belong_to_the_receiver(array: np.ndarray):
    datum = Datum(tokens=np.arange(3), loss_inputs={"x": array, "y": np.ones(1, np.float32)})
    call = messages.RunForwardBackward((ForwardBackward(run="r", data=(datum,), loss="ppo"),))
    got = carried(call).requests[0].data[0].loss_inputs
    np.testing.assert_array_equal(got["x"], array)
    assert got["x"].dtype == array.dtype
    assert got["x"].flags.writeable
    assert got["x"].flags.aligned
    assert got["y"].tolist() == [1.0]


@pytest.mark.parametrize(
    "call",
    [
        messages.Describe(),
        messages.Create("r", SPEC),
        messages.Save("r", "/somewhere", "snapshot"),
        messages.Cancel("q"),
        messages.Stop(),
    ],
)
def test_calls_arrive_as_they_were(call: Call):
    assert carried(call) == call


def test_optional_arrays_may_be_absent():
    request = SampleRequest(request_id="a", prompt=np.arange(4), num_samples=2, max_tokens=3)
    got = carried(messages.Sample(request)).request
    assert got.target_prompt_tokens is None
    assert got.prompt.tolist() == [0, 1, 2, 3]
    assert got.stop_strings == ()


def test_replies_arrive_as_they_were():
    failure = Failure(message="no", category="user")
    loss = LossResult(outputs=({"logprobs": np.ones(2, np.float32)},), metrics={"loss:sum": 1.0})
    good, bad = carried(messages.losses([loss, failure]), Reply).outcomes
    assert bad.value == failure
    assert good.value.metrics == loss.metrics
    topk = TopkLogprobs(token_ids=np.ones((1, 2), np.int32), logprobs=np.ones((1, 2), np.float32))
    sequence = SampledSequence(
        tokens=np.ones(1, np.int32), logprobs=np.ones(1, np.float32), stop_reason="stop", topk=topk
    )
    got = carried(messages.sampled(SampleResult(sequences=(sequence,))), Reply).value
    assert got.sequences[0].topk.token_ids.tolist() == [[1, 1]]
    assert carried(messages.sampled(failure), Reply).value == failure


class Array(Struct, tag="Array"):
    """An array's description as a peer might forge it."""

    value: tuple[str, tuple[int, ...], int]


class RealArray(Struct, tag="Array"):
    value: np.ndarray


@pytest.mark.parametrize(
    "forged",
    [
        ("<i8", (3,), 0),
        ("|O", (1,), 0),
        ("<i8", (-1,), 0),
        ("<i8", (0,), -8),
        ("nonsense", (0,), 0),
    ],
)
def test_an_array_that_is_not_in_the_frame_is_malformed(forged):
    with pytest.raises(MalformedFrameError):
        carried(Array(forged), RealArray)


def test_a_malformed_call_is_named_and_the_next_one_is_read():
    ours, theirs = socket.socketpair()
    with ours, theirs:
        sender, receiver = Channel[Call](ours, Call), Channel[Call](theirs, Call)
        sender.send(1, {"type": "Unheard"})
        ours.sendall(HEADER.pack(2, 3, 16) + b"\xc1\xc1\xc1" + bytes(13))
        sender.send(3, messages.Stop())
        for call_id in (1, 2):
            with pytest.raises(MalformedFrameError) as caught:
                receiver.receive()
            assert caught.value.call_id == call_id
        assert receiver.receive() == (3, messages.Stop())
        ours.close()
        with pytest.raises(EOFError):
            receiver.receive()


def test_large_arrays_are_sent_from_where_they_are():
    array = np.zeros(1 << 20, np.uint8)
    parts = encode(1, messages.Sample(_request(array)))
    assert any(np.shares_memory(np.frombuffer(part, np.uint8), array) for part in parts)
    assert len(parts) <= 3


def test_a_frame_may_travel_as_one_array_which_stays_its_owners():
    frame = packed(7, messages.Sample(_request(np.arange(5))))
    assert (frame.dtype, frame.ndim) == (np.uint8, 1)
    call_id, call = unpacked(frame, Decoder[Call](Call))
    assert call_id == 7
    assert call.request.prompt.tolist() == [0, 1, 2, 3, 4]
    call.request.prompt[0] = 9
    assert unpacked(frame, Decoder[Call](Call))[1].request.prompt[0] == 0


def test_what_cannot_be_sent_is_the_senders_error():
    with pytest.raises(NotImplementedError):
        encode(1, messages.Cancel(object()))  # pyrefly: ignore
    assert msgspec.msgpack.decode(b"\x01") == 1


def _request(prompt: np.ndarray) -> SampleRequest:
    return SampleRequest(request_id="a", prompt=prompt, num_samples=1, max_tokens=1)
