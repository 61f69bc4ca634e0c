"""forward_backward bodies that are almost right, down to the bytes of the protobuf encoding."""

from __future__ import annotations

from typing import Any

import numpy as np
from hypothesis import strategies as st
from tinker.proto import tinker_public_pb2 as pb

_VARINT, _FIXED64, _BYTES, _GROUP, _FIXED32 = 0, 1, 2, 3, 5
_UNKNOWN_FIELD = 1000
_LENGTHS = [2**7, 2**31 - 1, 2**31, 2**32 - 1, 2**63 - 1, 2**64 - 1]


@st.composite
def messages(draw: st.DrawFn, run: str) -> Any:
    """A request as the SDK builds one: tensors dense and sparse, spans, both configs."""
    message = pb.ForwardBackwardRequest(
        model_id=run,
        seq_id=draw(st.integers(1, 40)),
        loss_fn="cross_entropy",
        forward_only=draw(st.booleans()),
    )
    for length in draw(st.lists(st.integers(1, 5), min_size=1, max_size=3)):
        _add_datum(message.data.add(), length, draw(st.booleans()))
    if draw(st.booleans()):
        message.loss_fn_config["a"] = 1.0
        message.loss_fn_config_v2["a"].number = 1.0
        message.loss_fn_config_v2["b"].text = "c"
    return message


def _add_datum(datum: Any, length: int, rich: bool) -> None:
    datum.model_input.add().encoded_text.tokens = np.arange(length, dtype="<i4").tobytes()
    targets = datum.loss_fn_inputs["target_tokens"]
    targets.dense = np.arange(length, dtype="<i8").tobytes()
    targets.dtype = pb.DTYPE_INT64
    targets.shape.append(length)
    if not rich:
        return
    weights = datum.loss_fn_inputs["weights"]
    weights.sparse_csr.values = np.ones(1, dtype="<f4").tobytes()
    weights.sparse_csr.crow_indices = np.array([0, 1], dtype="<i8").tobytes()
    weights.sparse_csr.col_indices = np.array([0], dtype="<i8").tobytes()
    weights.dtype = pb.DTYPE_FLOAT32
    weights.shape.extend([1, length])
    span = datum.model_input_spans.add().prompt_tokens
    span.sequence_id, span.length = "unknown", length


def _varint(value: int) -> bytes:
    found = bytearray()
    while value >= 0x80:
        found.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes([*found, value])


def _read_varint(body: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        value |= (body[at] & 0x7F) << shift
        at, shift = at + 1, shift + 7
        if body[at - 1] < 0x80:
            return value, at


Field = tuple[int, bytes]
"""A field's tag, and its content without the length."""


def _fields(body: bytes) -> list[Field]:
    """Raises IndexError or ValueError for what is no message."""
    found, at = [], 0
    while at < len(body):
        tag, at = _read_varint(body, at)
        match tag & 7:
            case 0:
                end = _read_varint(body, at)[1]
            case 1:
                end = at + 8
            case 2:
                size, at = _read_varint(body, at)
                end = at + size
            case 5:
                end = at + 4
            case other:
                raise ValueError(other)
        if end > len(body):
            raise ValueError(end)
        found.append((tag, body[at:end]))
        at = end
    return found


def _written(field: Field, length: int | None = None) -> bytes:
    tag, content = field
    if tag & 7 != _BYTES:
        return _varint(tag) + content
    return _varint(tag) + _varint(len(content) if length is None else length) + content


@st.composite
def mutated(draw: st.DrawFn, body: bytes) -> bytes:
    """The body with one thing wrong in it, somewhere in its nested messages."""
    try:
        fields = _fields(body)
    except (IndexError, ValueError):
        fields = []
    if not fields:
        return draw(damaged(body))
    at = draw(st.integers(0, len(fields) - 1))
    tag, content = fields[at]
    parts = [_written(field) for field in fields]
    choice = draw(st.integers(0, 9))
    if choice < 4 and tag & 7 == _BYTES:
        parts[at] = _written((tag, draw(mutated(content))))
        return b"".join(parts)
    match choice:
        case 4:
            parts += [parts[at]] * draw(st.sampled_from([1, 2, 500]))
        case 5:
            parts[at] = _varint(tag & ~7 | draw(st.integers(0, 7))) + content
        case 6:
            parts.insert(at, draw(_nested()))
        case 7:
            parts[at] = _written((tag & ~7 | _BYTES, content), draw(st.sampled_from(_LENGTHS)))
        case 8:
            parts = draw(st.permutations(parts))
        case _:
            return draw(damaged(body))
    return b"".join(parts)


@st.composite
def _nested(draw: st.DrawFn) -> bytes:
    """Fields nobody knows, or a datum within a datum, more or less deep."""
    depth = draw(st.sampled_from([1, 50, 99, 101, 5000]))
    if draw(st.booleans()):
        start = _varint(_UNKNOWN_FIELD << 3 | _GROUP) * depth
        return start + _varint(_UNKNOWN_FIELD << 3 | 4) * draw(st.sampled_from([0, depth]))
    tag = draw(st.sampled_from([_UNKNOWN_FIELD, 1, 2, 3])) << 3 | _BYTES
    content = b""
    for _ in range(min(depth, 200)):
        content = _written((tag, content))
    return content


@st.composite
def damaged(draw: st.DrawFn, body: bytes) -> bytes:
    """Bytes flipped, or cut short."""
    if not body or draw(st.integers(0, 3)) == 0:
        return body[: draw(st.integers(0, len(body)))]
    changed = bytearray(body)
    for place in draw(st.lists(st.integers(0, len(body) - 1), min_size=1, max_size=4)):
        changed[place] = draw(st.integers(0, 255))
    return bytes(changed)
