"""Provenance spans, as the SDK's own converter sends them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from tinker import types
from tinker.proto import tinker_public_pb2 as pb
from tinker.proto.request_conv import forward_backward_request_to_proto

from server.core.errors import BadInput
from server.wire.provenance import MAX_SPANS, Provenance, Span, placed
from server.wire.recorded import body_of, join, restored, with_logprobs
from server.wire.training import (
    PROTOBUF_CONTENT_TYPE,
    ContentRefused,
    TrainingSubmission,
    decode_training,
)

INPUT = [
    types.PromptProvenanceSpan(sequence_id="s:0", length=2),
    types.SampledProvenanceSpan(sequence_id="s:0", length=1),
]
ROWS = [
    types.PromptProvenanceSpan(sequence_id="s:0", offset=1, length=1),
    types.SampledProvenanceSpan(sequence_id="s:0", length=2),
]


def message(**loss_inputs: Any) -> Any:
    """One datum of 3 tokens with spans, and one without."""
    plain = types.Datum(
        model_input=types.ModelInput.from_ints([1, 2, 3]),
        loss_fn_inputs=loss_inputs or {"target_tokens": [2, 3, 4]},
    )
    body = types.ForwardBackwardInput(
        data=[plain.with_provenance(INPUT, ROWS), plain], loss_fn="ppo"
    )
    return forward_backward_request_to_proto(
        types.ForwardBackwardRequest(model_id="run", seq_id=1, forward_backward_input=body)
    )


def decode(request: Any) -> TrainingSubmission:
    return decode_training(request.SerializeToString(), PROTOBUF_CONTENT_TYPE)


def test_spans_arrive_in_order_and_datums_without_them_have_none() -> None:
    first, second = decode(message()).provenance
    assert first == Provenance(
        model_input=(Span("prompt", "s:0", 0, 2), Span("sampled", "s:0", 0, 1)),
        loss_rows=(Span("prompt", "s:0", 1, 1), Span("sampled", "s:0", 0, 2)),
    )
    assert second is None


def test_a_span_stands_where_those_before_it_end() -> None:
    (first, _) = decode(message()).provenance
    assert first is not None
    assert [(is_input, place, start) for is_input, place, start, _ in placed("d", first)] == [
        (True, "d.model_input_spans[0]", 0),
        (True, "d.model_input_spans[1]", 2),
        (False, "d.loss_fn_input_spans[0]", 0),
        (False, "d.loss_fn_input_spans[1]", 1),
    ]


def test_rows_of_many_targets_are_not_counted() -> None:
    """The SDK does not say whether they would be counted by row or by target."""
    request = message(target_tokens=np.zeros((3, 2), np.int64))
    assert decode(request).provenance[0] is not None


def test_json_bodies_have_no_spans() -> None:
    body = (
        b'{"model_id": "run", "seq_id": 1, "forward_backward_input": {"loss_fn": "ppo", "data": '
        b'[{"model_input": {"chunks": [{"tokens": [1]}]}, "loss_fn_inputs": {}}]}}'
    )
    assert decode_training(body, "application/json").provenance == (None,)


def spoiled(change: str) -> Any:
    request = message()
    datum = request.data[0]
    match change:
        case "one list":
            del datum.loss_fn_input_spans[:]
        case "short":
            del datum.model_input_spans[0]
        case "long":
            datum.loss_fn_input_spans[1].sampled_tokens.length = 3
        case "huge":
            datum.model_input_spans[0].prompt_tokens.length = 2**62
            datum.model_input_spans[1].sampled_tokens.length = 2**62
        case "negative length":
            datum.model_input_spans[0].prompt_tokens.length = -1
        case "negative offset":
            datum.model_input_spans[1].sampled_tokens.offset = -5
        case "no name":
            datum.model_input_spans[1].sampled_tokens.sequence_id = ""
        case "no kind":
            datum.model_input_spans[1].CopyFrom(pb.ProvenanceSpan())
        case "many":
            datum.model_input_spans.extend([datum.model_input_spans[0]] * MAX_SPANS)
    return request


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ("one list", "data[0].loss_fn_input_spans: cover 0 positions; there are 3"),
        ("short", "data[0].model_input_spans: cover 1 positions; there are 3"),
        ("long", "data[0].loss_fn_input_spans: cover 4 positions; there are 3"),
        ("huge", "data[0].model_input_spans: cover 9223372036854775808 positions"),
        ("negative length", "data[0].model_input_spans[0].length: is -1; it must be at least 0."),
        ("negative offset", "data[0].model_input_spans[1].offset: is -5"),
        ("no name", "data[0].model_input_spans[1].sequence_id: is empty."),
        ("no kind", "data[0].model_input_spans[1]: says neither prompt_tokens nor"),
        ("many", f"has {MAX_SPANS + 2} spans; the limit is {MAX_SPANS}."),
    ],
)
def test_spans_that_cover_no_datum_are_refused(change: str, sentence: str) -> None:
    with pytest.raises(ContentRefused) as caught:
        decode(spoiled(change))
    assert sentence in str(caught.value)
    assert caught.value.envelope.seq_id == 1


def test_a_journaled_pass_has_its_body_and_the_recorded_logprobs() -> None:
    body = message().SerializeToString()
    logprobs = [np.array([0, -1.5, -2], np.float32), np.array([-3, 0, 0.25], np.float32)]
    payload = join(body, logprobs)
    assert body_of(payload) == body
    request = decode_training(body, PROTOBUF_CONTENT_TYPE).request
    again = restored(request, payload)
    for datum, given, live in zip(
        again.data, logprobs, with_logprobs(request, logprobs).data, strict=True
    ):
        np.testing.assert_array_equal(datum.loss_inputs["logprobs"], given)
        np.testing.assert_array_equal(live.loss_inputs["logprobs"], given)
        assert set(datum.loss_inputs) == {"target_tokens", "logprobs"}
    assert "logprobs" not in request.data[0].loss_inputs


def test_the_journals_own_content_type_is_not_for_clients() -> None:
    payload = join(message().SerializeToString(), [np.zeros(3), np.zeros(3)])
    with pytest.raises(BadInput):
        decode_training(payload, "application/x-hearth-recorded-logprobs")
