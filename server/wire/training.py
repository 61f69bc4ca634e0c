"""A `forward_backward` body, protobuf or the JSON of SDKs before 0.25, to a submission.

Reading goes in two steps, the envelope (which run, which seq_id) and the content, because a
seq_id is used up even when its content is refused: the client goes on with the next one.
"""

from __future__ import annotations

from dataclasses import dataclass
from reprlib import repr as brief
from typing import Annotated, Any

import numpy as np
from google.protobuf.message import DecodeError
from pydantic import FailFast, Field

from backends.contract import Datum, ForwardBackward
from server.core.errors import BadInput
from server.wire import schema
from server.wire.bounds import check_messages
from server.wire.json_shapes import (
    ModelInputBody,
    TensorBody,
    WireModel,
    not_text,
    parse_json,
    parse_object,
)
from server.wire.provenance import Provenance, decode_provenance
from server.wire.tensors import CellBudget, array_of, check_whole, flat_from_protobuf, to_dense

PROTOBUF_CONTENT_TYPE = "application/x-protobuf"
MAX_SEQ_ID = 2**31 - 1
# Each costs us far more memory than the two bytes that an empty one costs its sender.
MAX_DATUMS = 65_536
MAX_INPUTS = 64
_TOKEN = np.dtype("<i4")


@dataclass(frozen=True, slots=True, kw_only=True)
class Envelope:
    """Whom a submission is for."""

    model_id: str
    seq_id: int


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingSubmission:
    """A submission that could be read; whether it makes sense is for `runs.validation`."""

    model_id: str
    seq_id: int
    request: ForwardBackward
    provenance: tuple[Provenance | None, ...]
    """One a datum: which sampled sequences its tokens came from, where it says so."""


class ContentRefused(BadInput):
    """The envelope could be read and the content not: the seq_id of `envelope` is used up."""

    def __init__(self, message: str, envelope: Envelope) -> None:
        super().__init__(message)
        self.envelope = envelope


def decode_training(body: bytes, content_type: str | None) -> TrainingSubmission:
    """Read a body by its content type.

    Raises ContentRefused when only the content is at fault, BadInput when not even the envelope
    can be read.
    """
    if (content_type or "").partition(";")[0].strip().lower() == PROTOBUF_CONTENT_TYPE:
        return _decode_protobuf(body)
    return _decode_json(body)


def _envelope(model_id: str, seq_id: int) -> Envelope:
    if not model_id:
        raise BadInput("model_id: is missing.")
    # The SDK counts from 1, so 0 in protobuf is a seq_id that was never set.
    if not 1 <= seq_id <= MAX_SEQ_ID:
        raise BadInput(f"seq_id: is {seq_id}; it must be from 1 to {MAX_SEQ_ID}.")
    return Envelope(model_id=model_id, seq_id=seq_id)


def _decode_protobuf(body: bytes) -> TrainingSubmission:
    check_messages(body)
    message = schema.ForwardBackwardRequest()
    try:
        message.ParseFromString(body)
    except DecodeError as error:
        raise BadInput("The request body is not a ForwardBackwardRequest in protobuf.") from error
    envelope = _envelope(message.model_id, message.seq_id)
    try:
        data = _data_from_protobuf(message.data)
        return _submission(
            envelope,
            data=data,
            provenance=_provenance(message.data, data),
            loss=message.loss_fn,
            loss_config=_config_from_protobuf(message),
            backward=not message.forward_only,
        )
    except BadInput as error:
        raise ContentRefused(str(error), envelope) from error


def _submission(
    envelope: Envelope,
    *,
    data: tuple[Datum, ...],
    provenance: tuple[Provenance | None, ...],
    loss: str,
    loss_config: dict[str, float | str],
    backward: bool,
) -> TrainingSubmission:
    request = ForwardBackward(
        run=envelope.model_id, data=data, loss=loss, loss_config=loss_config, backward=backward
    )
    return TrainingSubmission(
        model_id=envelope.model_id, seq_id=envelope.seq_id, request=request, provenance=provenance
    )


def _data_from_protobuf(messages: Any) -> tuple[Datum, ...]:
    _check_count("data", len(messages), MAX_DATUMS)
    budget = CellBudget()
    return tuple(
        Datum(
            tokens=_tokens(f"data[{i}].model_input", message.model_input),
            loss_inputs=_inputs(f"data[{i}].loss_fn_inputs", message.loss_fn_inputs, budget),
        )
        for i, message in enumerate(messages)
    )


def _provenance(messages: Any, data: tuple[Datum, ...]) -> tuple[Provenance | None, ...]:
    return tuple(
        decode_provenance(f"data[{i}]", message, datum)
        for i, (message, datum) in enumerate(zip(messages, data, strict=True))
    )


def _check_count(where: str, count: int, limit: int) -> None:
    if count > limit:
        raise BadInput(f"{where}: has {count} items; the limit is {limit}.")


def _tokens(where: str, chunks: Any) -> np.ndarray:
    raw = b"".join(_text(where, i, chunk) for i, chunk in enumerate(chunks))
    return array_of(where, raw, _TOKEN).astype(np.int64)


def _text(where: str, index: int, chunk: Any) -> bytes:
    kind = chunk.WhichOneof("chunk")
    if kind != "encoded_text":
        raise BadInput(not_text(f"{where}[{index}]", kind or "unknown"))
    tokens = chunk.encoded_text.tokens
    check_whole(f"{where}[{index}].tokens", tokens, _TOKEN)
    return tokens


def _inputs(where: str, messages: Any, budget: CellBudget) -> dict[str, np.ndarray]:
    _check_count(where, len(messages), MAX_INPUTS)
    inputs: dict[str, np.ndarray] = {}
    # Sorted, so that a refusal names the same input every time.
    for name in sorted(messages):
        place = f"{where}[{brief(name)}]"
        inputs[name] = to_dense(place, flat_from_protobuf(place, messages[name]), budget)
    return inputs


def _config_from_protobuf(message: Any) -> dict[str, float | str]:
    """`loss_fn_config_v2` also carries strings; the older map repeats its numbers."""
    if not message.loss_fn_config_v2:
        return dict(message.loss_fn_config)
    config: dict[str, float | str] = {}
    for name in sorted(message.loss_fn_config_v2):
        value = message.loss_fn_config_v2[name]
        kind = value.WhichOneof("value")
        if kind is None:
            raise BadInput(f"loss_fn_config[{brief(name)}]: has no value.")
        config[name] = value.number if kind == "number" else value.text
    return config


class _EnvelopeBody(WireModel):
    model_id: str
    seq_id: int
    forward_backward_input: object = None
    forward_input: object = None


class _DatumBody(WireModel):
    model_input: ModelInputBody
    loss_fn_inputs: Annotated[dict[str, TensorBody], FailFast()] = Field(
        default_factory=dict, max_length=MAX_INPUTS
    )


class _ContentBody(WireModel):
    data: Annotated[list[_DatumBody], FailFast()] = Field(max_length=MAX_DATUMS)
    loss_fn: str
    loss_fn_config: dict[str, Any] = Field(default_factory=dict)


class ForwardBackwardBody(_EnvelopeBody):
    """The whole of it, to be described: it is read in two steps."""

    forward_backward_input: _ContentBody | None = None
    forward_input: _ContentBody | None = None


def _decode_json(body: bytes) -> TrainingSubmission:
    parsed = parse_json(_EnvelopeBody, body)
    envelope = _envelope(parsed.model_id, parsed.seq_id)
    # The one call of old SDKs that only computes the loss names its input differently.
    backward = parsed.forward_input is None
    field = "forward_backward_input" if backward else "forward_input"
    try:
        content = parse_object(_ContentBody, getattr(parsed, field), field)
        data = _data_from_json(content.data)
        return _submission(
            envelope,
            data=data,
            # SDKs that send JSON know no spans.
            provenance=(None,) * len(data),
            loss=content.loss_fn,
            loss_config={n: _config_value(n, v) for n, v in content.loss_fn_config.items()},
            backward=backward,
        )
    except BadInput as error:
        raise ContentRefused(str(error), envelope) from error


def _data_from_json(bodies: list[_DatumBody]) -> tuple[Datum, ...]:
    budget = CellBudget()
    return tuple(
        Datum(
            tokens=body.model_input.tokens(f"data[{i}].model_input"),
            loss_inputs={
                name: to_dense(
                    (where := f"data[{i}].loss_fn_inputs[{brief(name)}]"),
                    tensor.flat(where),
                    budget,
                )
                for name, tensor in body.loss_fn_inputs.items()
            },
        )
        for i, body in enumerate(bodies)
    )


def _config_value(name: str, value: object) -> float | str:
    if isinstance(value, str):
        return value
    if isinstance(value, int | float) and not isinstance(value, bool):
        return float(value)
    raise BadInput(
        f"loss_fn_config[{brief(name)}]: is {brief(value)}; it must be a number or text."
    )
