"""Bodies that would become far more objects than bytes are refused before they are parsed."""

from __future__ import annotations

import pytest

from server.core.errors import BadInput
from server.wire import schema
from server.wire.bounds import MAX_JSON_ITEMS, MAX_JSON_OBJECTS, MAX_MESSAGES, check_json
from server.wire.json_shapes import WireModel, parse_json
from server.wire.training import PROTOBUF_CONTENT_TYPE, decode_training

EMPTY_DATUM = b"\x1a\x00"  # field 3, length 0
EMPTY_CHUNK = b"\x0a\x00"  # field 1, length 0


def test_more_datums_than_a_request_may_hold_are_refused_before_they_are_parsed() -> None:
    body = EMPTY_DATUM * (MAX_MESSAGES + 1)
    with pytest.raises(BadInput, match=f"more than {MAX_MESSAGES} messages"):
        decode_training(body, PROTOBUF_CONTENT_TYPE)


def test_chunks_inside_a_datum_count_too() -> None:
    inner = EMPTY_CHUNK * (MAX_MESSAGES + 1)
    body = b"\x1a" + _varint(len(inner)) + inner
    with pytest.raises(BadInput, match=f"more than {MAX_MESSAGES} messages"):
        decode_training(body, PROTOBUF_CONTENT_TYPE)


def test_a_large_honest_batch_passes() -> None:
    message = schema.ForwardBackwardRequest(model_id="m", seq_id=1, loss_fn="cross_entropy")
    for _ in range(2000):
        datum = message.data.add()
        datum.model_input.add().encoded_text.tokens = bytes(4 * 100)
    assert len(decode_training(message.SerializeToString(), PROTOBUF_CONTENT_TYPE).request.data)


@pytest.mark.parametrize(
    ("body", "limit"),
    [
        (b'{"x":[' + b"{}," * (MAX_JSON_OBJECTS + 1) + b"{}]}", MAX_JSON_OBJECTS),
        (b'{"x":[' + b"1," * (MAX_JSON_ITEMS + 1) + b"1]}", MAX_JSON_ITEMS),
    ],
)
def test_json_of_too_many_parts_is_refused_even_where_nobody_reads_it(
    body: bytes, limit: int
) -> None:
    with pytest.raises(BadInput, match=f"more than {limit}"):
        check_json(body)
    with pytest.raises(BadInput, match=f"more than {limit}"):
        parse_json(WireModel, body)


def _varint(value: int) -> bytes:
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes([*out, value])
