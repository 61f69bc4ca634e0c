from __future__ import annotations

import gzip
import tracemalloc

import pytest
import zstandard
from hypothesis import given
from hypothesis import strategies as st

from server.core.errors import BadInput, ServiceError, TooLarge
from server.wire.body import decode_body

LIMIT = 10_000


def decode(body: bytes, encoding: str | None, limit: int = LIMIT) -> bytes:
    return decode_body(body, encoding, max_bytes=10 * LIMIT, max_decoded_bytes=limit)


def zstd(content: bytes) -> bytes:
    return zstandard.ZstdCompressor().compress(content)


def zstd_without_size(content: bytes) -> bytes:
    return zstandard.ZstdCompressor(write_content_size=False).compress(content)


PACKERS = {"zstd": zstd, "zstd without size": zstd_without_size, "gzip": gzip.compress}
packers = pytest.mark.parametrize("packer", PACKERS)


@given(st.binary(min_size=1, max_size=LIMIT), st.sampled_from(sorted(PACKERS)))
def test_what_was_compressed_comes_back(content: bytes, packer: str) -> None:
    assert decode(PACKERS[packer](content), packer.split()[0]) == content


@pytest.mark.parametrize("encoding", [None, "", "identity", "Identity"])
def test_a_body_without_encoding_is_taken_as_it_is(encoding: str | None) -> None:
    assert decode(b"plain", encoding) == b"plain"


def test_an_unknown_encoding_is_refused_with_the_known_ones() -> None:
    with pytest.raises(BadInput, match=r"'br'.*identity, zstd and gzip"):
        decode(b"x", "br")


@packers
def test_a_body_of_exactly_the_limit_passes(packer: str) -> None:
    assert len(decode(PACKERS[packer](bytes(LIMIT)), packer.split()[0])) == LIMIT


@packers
def test_a_body_one_byte_above_the_limit_is_too_large(packer: str) -> None:
    with pytest.raises(TooLarge, match=f"limit of {LIMIT} bytes"):
        decode(PACKERS[packer](bytes(LIMIT + 1)), packer.split()[0])


def test_an_uncompressed_body_above_the_decoded_limit_is_too_large() -> None:
    with pytest.raises(TooLarge):
        decode(bytes(LIMIT + 1), None)


def test_a_body_above_the_received_limit_is_too_large() -> None:
    with pytest.raises(TooLarge, match=r"has 100001 bytes; the limit is 100000"):
        decode(bytes(10 * LIMIT + 1), "zstd")


@packers
def test_a_bomb_is_refused_within_the_memory_of_the_limit(packer: str) -> None:
    bomb = PACKERS[packer](bytes(2**26))
    limit = 2**20

    tracemalloc.start()
    try:
        with pytest.raises(TooLarge):
            decode(bomb, packer.split()[0], limit)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()

    assert peak < 2 * limit + 2**18


def test_a_frame_that_needs_a_huge_window_is_too_large() -> None:
    packer = zstandard.ZstdCompressor(
        compression_params=zstandard.ZstdCompressionParameters(window_log=27)
    ).compressobj()
    frame = packer.compress(b"small") + packer.flush()
    assert zstandard.get_frame_parameters(frame).window_size == 2**27

    with pytest.raises(TooLarge):
        decode(frame, "zstd")


def test_a_frame_that_lies_about_its_size_is_refused() -> None:
    frame = bytearray(zstd(bytes(range(100))))
    assert frame[5] == 100, "the byte of a small frame that holds its content's size"
    frame[5] = 90

    with pytest.raises(BadInput):
        decode(bytes(frame), "zstd")


@packers
@pytest.mark.parametrize("content", [b"content" * 9, b""])
def test_a_second_frame_or_garbage_is_refused(packer: str, content: bytes) -> None:
    whole = PACKERS[packer](content)
    for extra in (whole, b"junk"):
        with pytest.raises(BadInput):
            decode(whole + extra, packer.split()[0])


@packers
def test_two_frames_that_fit_only_one_by_one_are_still_bad_input(packer: str) -> None:
    with pytest.raises(BadInput):
        decode(PACKERS[packer](bytes(LIMIT)) * 2, packer.split()[0])


@packers
def test_a_body_cut_short_anywhere_is_refused(packer: str) -> None:
    whole = PACKERS[packer](bytes(range(256)))
    for length in range(len(whole)):
        with pytest.raises(BadInput):
            decode(whole[:length], packer.split()[0])


@given(st.data(), st.sampled_from(sorted(PACKERS)), st.binary(min_size=1, max_size=300))
def test_no_damage_passes_the_limit_or_breaks_the_reader(
    data: st.DataObject, packer: str, content: bytes
) -> None:
    damaged = bytearray(PACKERS[packer](content * data.draw(st.integers(1, 200))))
    for place in data.draw(st.lists(st.integers(0, len(damaged) - 1), max_size=4)):
        damaged[place] = data.draw(st.integers(0, 255))
    try:
        decoded = decode(bytes(damaged), packer.split()[0], 1000)
    except ServiceError:
        return
    assert len(decoded) <= 1000
