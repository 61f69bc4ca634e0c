"""Folders of weights on local disk. A folder is written once under a new random name and never
changed, so what reads one never sees half of it, and a row that names one is always right."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import structlog

from server.core.ids import new_folder_name

log = structlog.get_logger()


class Storage:
    """Names in the database are relative to the root: the data folder can be moved."""

    def __init__(self, root: Path) -> None:
        self.root = root.resolve()

    def new(self) -> str:
        """The name of a folder that does not exist yet."""
        self.root.mkdir(parents=True, exist_ok=True)
        return new_folder_name()

    def path(self, folder: str) -> str:
        """Where a folder lies, absolute, for a backend on this machine."""
        return str(self.root / folder)

    def exists(self, folder: str) -> bool:
        return (self.root / folder).is_dir()

    def files(self, folder: str) -> list[str]:
        return sorted(entry.name for entry in (self.root / folder).iterdir() if entry.is_file())

    def copy(self, folder: str) -> str:
        """A new folder with the same files, linked where the disk allows: they never change."""
        name = self.new()
        shutil.copytree(self.root / folder, self.root / name, copy_function=_link_or_copy)
        return name

    def remove(self, folder: str | None) -> None:
        """Give the space back; a folder that is gone already is fine."""
        if folder is None:
            return
        try:
            shutil.rmtree(self.root / folder)
        except FileNotFoundError:
            log.debug("folder_already_gone", folder=folder)

    def remove_all_but(self, keep: set[str]) -> int:
        """At start: what a crash left behind before any row named it."""
        if not self.root.is_dir():
            return 0
        orphans = [entry for entry in self.root.iterdir() if entry.name not in keep]
        for entry in orphans:
            shutil.rmtree(entry) if entry.is_dir() else entry.unlink()
        return len(orphans)


def _link_or_copy(source: str, target: str) -> None:
    try:
        os.link(source, target)
    except OSError:
        shutil.copy2(source, target)
