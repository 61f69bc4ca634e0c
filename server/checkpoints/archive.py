"""A checkpoint as one tar file, for SDKs that download archives: made while it is sent."""

from __future__ import annotations

import tarfile
from collections.abc import Iterator
from pathlib import Path

NAME = "archive.tar"
_BLOCK = tarfile.BLOCKSIZE
_END = bytes(2 * _BLOCK)
_CHUNK = 1 << 20


def archive_bytes(files: list[Path]) -> int:
    """How long the archive of these files is."""
    return sum(_BLOCK + _padded(file.stat().st_size) for file in files) + len(_END)


def stream(files: list[Path]) -> Iterator[bytes]:
    for file in files:
        entry = tarfile.TarInfo(file.name)
        entry.size = file.stat().st_size
        entry.mtime = int(file.stat().st_mtime)
        yield entry.tobuf(tarfile.USTAR_FORMAT)
        with file.open("rb") as content:
            while chunk := content.read(_CHUNK):
                yield chunk
        yield bytes(_padded(entry.size) - entry.size)
    yield _END


def _padded(size: int) -> int:
    return -(-size // _BLOCK) * _BLOCK
