"""Folders that appear whole or not at all, whenever the process or the machine dies."""

from __future__ import annotations

import os
import shutil
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def new_folder(directory: str | Path) -> Generator[Path]:
    """A temporary sibling to write into; it takes `directory`'s place when the block ends well.

    One writer a directory. An existing folder is replaced, and stays as it was if the block
    raises. What a killed writer left behind is removed by the next one of the same directory.
    """
    target = settled(directory)
    temporary = target.with_name(f".{target.name}.writing")
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir(parents=True)
    try:
        yield temporary
        for file in temporary.iterdir():
            _fsync(file)
        _fsync(temporary)
        _put_in_place(temporary, target)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def settled(directory: str | Path) -> Path:
    """The directory, after finishing or undoing a replacement that a crash cut in two. Call it
    before reading a folder that `new_folder` may have been replacing."""
    target = Path(directory)
    replaced = _replaced(target)
    if replaced.exists():
        if target.exists():
            shutil.rmtree(replaced)
        else:
            replaced.rename(target)
    return target


def _replaced(target: Path) -> Path:
    return target.with_name(f".{target.name}.replaced")


def _put_in_place(temporary: Path, target: Path) -> None:
    """POSIX cannot rename onto a folder with files in it, so the old one steps aside first; a
    crash between the two renames is what `settled` repairs."""
    if target.exists():
        target.rename(_replaced(target))
    temporary.rename(target)
    _fsync(target.parent)
    shutil.rmtree(_replaced(target), ignore_errors=True)


def _fsync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
