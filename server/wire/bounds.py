"""How many objects a body would become, counted before a parser makes them: a few bytes of wire
can cost a hundred times their size in memory."""

from __future__ import annotations

from collections.abc import Iterator

from server.core.errors import BadInput

MAX_MESSAGES = 1_000_000
MAX_JSON_OBJECTS = 200_000
MAX_JSON_ITEMS = 8_000_000

_DATA_FIELD = 3
"""ForwardBackwardRequest.data, whose messages are looked into."""


def check_messages(body: bytes) -> None:
    """Raises BadInput for a ForwardBackwardRequest of too many messages. Bytes that are no
    message pass: the parser says so better."""
    count = 0
    try:
        for number, start, end in _fields(body, 0, len(body)):
            count += 1
            if number == _DATA_FIELD:
                count += _count(body, start, end, MAX_MESSAGES - count)
            if count > MAX_MESSAGES:
                raise BadInput(f"The request body holds more than {MAX_MESSAGES} messages.")
    except (IndexError, ValueError):
        return


def check_json(body: bytes) -> None:
    """Raises BadInput for JSON of too many objects or items; the same in text count too."""
    if body.count(b"{") > MAX_JSON_OBJECTS:
        raise BadInput(f"The request body holds more than {MAX_JSON_OBJECTS} JSON objects.")
    if body.count(b",") > MAX_JSON_ITEMS:
        raise BadInput(f"The request body holds more than {MAX_JSON_ITEMS} JSON items.")


def _count(body: bytes, start: int, end: int, most: int) -> int:
    count = 0
    for _ in _fields(body, start, end):
        count += 1
        if count > most:
            break
    return count


def _fields(body: bytes, at: int, end: int) -> Iterator[tuple[int, int, int]]:
    """(field number, start, end) of every field between two offsets."""
    while at < end:
        tag, at = _varint(body, at)
        start = at
        match tag & 7:
            case 0:
                _, at = _varint(body, at)
            case 1:
                at += 8
            case 2:
                length, start = _varint(body, at)
                at = start + length
            case 5:
                at += 4
            case other:
                raise ValueError(f"wire type {other}")
        yield tag >> 3, start, at


def _varint(body: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = body[at]
        at += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, at
        shift += 7
        if shift > 63:
            raise ValueError("a varint of more than 10 bytes")
