"""Undoes the `Content-Encoding` of a request body, never past a limit."""

from __future__ import annotations

import zlib

import zstandard

from server.core.errors import BadInput, TooLarge

# What the zstd format asks every decoder to support; smaller limits would refuse honest frames
# whose window is larger than their content.
_SMALLEST_WINDOW_LIMIT = 8 * 2**20


def decode_body(
    body: bytes, content_encoding: str | None, *, max_bytes: int, max_decoded_bytes: int
) -> bytes:
    """The body as it was before the client compressed it: as is, zstd or gzip.

    Raises TooLarge above `max_bytes` received or `max_decoded_bytes` decoded, and BadInput for
    anything that is not exactly one whole frame.
    """
    if len(body) > max_bytes:
        raise TooLarge(f"The request body has {len(body)} bytes; the limit is {max_bytes}.")
    match (content_encoding or "identity").strip().lower():
        case "identity" | "":
            return _within(body, max_decoded_bytes)
        case "zstd":
            return _unzstd(body, max_decoded_bytes)
        case "gzip" | "x-gzip":
            return _gunzip(body, max_decoded_bytes)
        case other:
            raise BadInput(
                f"Content-Encoding is {other[:40]!r}; this server reads identity, zstd and gzip."
            )


def _too_large(limit: int) -> TooLarge:
    return TooLarge(f"The request body unpacks to more than the limit of {limit} bytes.")


def _within(body: bytes, limit: int) -> bytes:
    if len(body) > limit:
        raise _too_large(limit)
    return body


def _unzstd(body: bytes, limit: int) -> bytes:
    window_limit = max(limit, _SMALLEST_WINDOW_LIMIT)
    unpacker = zstandard.ZstdDecompressor(max_window_size=window_limit)
    try:
        frame = zstandard.get_frame_parameters(body)
        if frame.window_size > window_limit:
            raise _too_large(limit)
        if frame.content_size == zstandard.CONTENTSIZE_UNKNOWN:
            return _unzstd_unsized(unpacker, body, limit)
        if frame.content_size > limit:
            raise _too_large(limit)
        # Into a buffer of the recorded size, and not a byte more.
        decoded = unpacker.decompress(body, allow_extra_data=False)
    except zstandard.ZstdError as error:
        raise BadInput(f"The request body is not one whole zstd frame: {error}.") from error
    if not decoded:
        # The library does not look behind an empty frame, and no request is empty.
        raise BadInput("The request body is an empty zstd frame.")
    return decoded


def _unzstd_unsized(unpacker: zstandard.ZstdDecompressor, body: bytes, limit: int) -> bytes:
    """Twice, since one reader of the library can stop at a limit and the other can tell where
    the frame ends. The SDK always records the size, so this is not the common way."""
    with unpacker.stream_reader(body, read_across_frames=False) as reader:
        if len(reader.read(limit + 1)) > limit:
            raise _too_large(limit)
    whole = unpacker.decompressobj()
    decoded = whole.decompress(body)
    if not whole.eof:
        raise BadInput("The request body is a zstd frame that was cut short.")
    if whole.unused_data:
        raise BadInput(f"The request body has {len(whole.unused_data)} bytes after its zstd frame.")
    return decoded


def _gunzip(body: bytes, limit: int) -> bytes:
    unpacker = zlib.decompressobj(wbits=16 + zlib.MAX_WBITS)
    try:
        decoded = unpacker.decompress(body, limit + 1)
    except zlib.error as error:
        raise BadInput(f"The request body is not gzip: {error}.") from error
    if len(decoded) > limit:
        raise _too_large(limit)
    if not unpacker.eof:
        raise BadInput("The request body is a gzip stream that was cut short.")
    if unpacker.unused_data:
        raise BadInput(
            f"The request body has {len(unpacker.unused_data)} bytes after its gzip stream."
        )
    return decoded
