"""Frames between the service and a worker process: a typed msgpack message with its arrays behind.

Layout, little-endian: uint64 call id, uint64 bytes of the message, uint64 bytes of the body; then
the body: the message, padding, and each array's own bytes at an offset of 16. In the message an
array is (dtype, shape, offset). Sending copies no large array; received arrays are views of the
one buffer their frame was read into, which they keep alive and nobody else sees.
"""

from __future__ import annotations

import socket
from collections.abc import Iterator
from struct import Struct
from typing import Any, Generic, NamedTuple, TypeVar

import msgspec
import numpy as np

Message = TypeVar("Message")
Part = bytes | bytearray | memoryview

HEADER = Struct("<QQQ")
_ALIGNMENT = 16
_KINDS = frozenset("iufb")
_SMALL = 64 << 10
"""Arrays under this are cheaper to copy together than to send one by one."""


class MalformedFrameError(Exception):
    """The frame of one call says nothing we know; the stream itself is intact."""

    def __init__(self, call_id: int, message: str) -> None:
        super().__init__(message)
        self.call_id = call_id


class Header(NamedTuple):
    call_id: int
    message_bytes: int
    body_bytes: int


def encode(call_id: int, message: object) -> list[Part]:
    """The frame, in parts to be sent one after the other."""
    arrays: list[np.ndarray] = []
    size = 0

    def describe(value: Any) -> tuple[str, tuple[int, ...], int]:
        nonlocal size
        if not isinstance(value, np.ndarray):
            raise NotImplementedError(f"{type(value).__name__} cannot be sent")
        offset, size = size, size + _padded(value.nbytes)
        arrays.append(np.ascontiguousarray(value))
        return value.dtype.str, value.shape, offset

    head = msgspec.msgpack.encode(message, enc_hook=describe)
    header = HEADER.pack(call_id, len(head), _padded(len(head)) + size)
    return list(_joined([header, head, _padding(len(head)), *_with_padding(arrays)]))


class Decoder(Generic[Message]):
    """Reads the bodies of one connection's frames; for one thread."""

    def __init__(self, message_type: Any) -> None:
        self._decoder = msgspec.msgpack.Decoder(message_type, dec_hook=self._array)
        self._arrays = np.empty(0, np.uint8)

    def decode(self, header: Header, body: np.ndarray) -> Message:
        """Raises MalformedFrameError."""
        self._arrays = body[_padded(header.message_bytes) :]
        try:
            return self._decoder.decode(body[: header.message_bytes].data)
        except msgspec.DecodeError as error:
            raise MalformedFrameError(header.call_id, str(error)) from error
        finally:
            self._arrays = np.empty(0, np.uint8)

    def _array(self, kind: type, value: Any) -> np.ndarray:
        if kind is not np.ndarray:
            raise NotImplementedError(f"{kind.__name__} cannot be received")
        name, shape, offset = msgspec.convert(value, tuple[str, tuple[int, ...], int])
        dtype = np.dtype(name)
        if dtype.kind not in _KINDS or min((offset, *shape)) < 0:
            raise ValueError(f"no array of {name}, {shape} at {offset} is possible")
        size = dtype.itemsize * int(np.prod(shape, dtype=np.int64))
        if offset + size > len(self._arrays):
            raise ValueError("the frame ends before its arrays do")
        return self._arrays[offset : offset + size].view(dtype).reshape(shape)


def new_body(raw_header: bytes | bytearray) -> tuple[Header, np.ndarray]:
    """The header, and uint8[body_bytes] to receive the body into."""
    header = Header(*HEADER.unpack(raw_header))
    return header, np.empty(header.body_bytes, np.uint8)


def packed(call_id: int, message: object) -> np.ndarray:
    """The frame as uint8[size]."""
    return np.frombuffer(b"".join(encode(call_id, message)), np.uint8)


def unpacked(frame: np.ndarray, decoder: Decoder[Message]) -> tuple[int, Message]:
    """What is in uint8[size], which stays its owner's. Raises MalformedFrameError."""
    header, body = new_body(frame[: HEADER.size].tobytes())
    body[:] = frame[HEADER.size :]
    return header.call_id, decoder.decode(header, body)


class Channel(Generic[Message]):
    """A blocking socket that speaks frames: one thread receives; senders take turns themselves."""

    def __init__(self, sock: socket.socket, message_type: Any) -> None:
        self._socket = sock
        self._decoder = Decoder[Message](message_type)

    def send(self, call_id: int, message: object) -> None:
        for part in encode(call_id, message):
            self._socket.sendall(part)

    def receive(self) -> tuple[int, Message]:
        """Raises EOFError when the other side is gone, MalformedFrameError for a bad call."""
        raw = bytearray(HEADER.size)
        self._fill(memoryview(raw))
        header, body = new_body(raw)
        self._fill(body.data)
        return header.call_id, self._decoder.decode(header, body)

    def _fill(self, view: memoryview) -> None:
        while len(view):
            received = self._socket.recv_into(view)
            if not received:
                raise EOFError("the other side closed the connection")
            view = view[received:]


def _padded(num_bytes: int) -> int:
    return -(-num_bytes // _ALIGNMENT) * _ALIGNMENT


def _padding(num_bytes: int) -> bytes:
    return bytes(_padded(num_bytes) - num_bytes)


def _with_padding(arrays: list[np.ndarray]) -> Iterator[Part]:
    for array in arrays:
        if array.nbytes:
            yield array.reshape(-1).view(np.uint8).data
            yield _padding(array.nbytes)


def _joined(parts: list[Part]) -> Iterator[Part]:
    """Small neighbours as one part, large ones as they are."""
    small = bytearray()
    for part in parts:
        if len(part) < _SMALL:
            small += part
            continue
        if small:
            yield small
            small = bytearray()
        yield part
    if small:
        yield small
