"""Downloads by signed URL: whoever holds one may fetch that file until it expires, without a key.

The signature is HMAC-SHA256 over folder, file and expiry, with a secret that never leaves the
data folder.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import secrets
from collections.abc import Callable
from pathlib import Path
from urllib.parse import urlencode

from server.checkpoints import archive
from server.checkpoints.storage import Storage
from server.core.errors import NotFound
from server.core.records import Checkpoint

LIFETIME_S = 3600
_HIDDEN = {"hearth.json"}
_SECRET_BYTES = 32


class Downloads:
    def __init__(self, storage: Storage, secret: bytes, clock: Callable[[], float]) -> None:
        self._storage = storage
        self._secret = secret
        self._clock = clock

    def urls(self, checkpoint: Checkpoint, base_url: str) -> tuple[dict[str, str], float]:
        """A URL for each file of a checkpoint, and when they all expire."""
        expires = int(self._clock()) + LIFETIME_S
        folder = checkpoint.folder
        return {
            name: f"{base_url}/api/v1/files/{folder}/{name}?{self._query(folder, name, expires)}"
            for name in self._names(folder)
        }, float(expires)

    def archive_url(self, checkpoint: Checkpoint, base_url: str) -> tuple[str, float]:
        """A URL for all files in one tar, and when it expires."""
        expires = int(self._clock()) + LIFETIME_S
        query = self._query(checkpoint.folder, archive.NAME, expires)
        return f"{base_url}/api/v1/archives/{checkpoint.folder}?{query}", float(expires)

    def archive(self, folder: str, expires: int, signature: str) -> list[Path]:
        """The files behind an archive's URL. Raises NotFound for a wrong or expired one."""
        self.open(folder, archive.NAME, expires, signature)
        return [Path(self._storage.path(folder)) / name for name in self._names(folder)]

    def open(self, folder: str, name: str, expires: int, signature: str) -> Path:
        """The file behind a URL. Raises NotFound for a wrong or expired one."""
        right = self._sign(folder, name, expires)
        good = hmac.compare_digest(signature.encode(errors="replace"), right.encode())
        if not good or expires < self._clock() or not self._storage.exists(folder):
            raise NotFound("the download link is not valid, or has expired")
        return Path(self._storage.path(folder)) / name

    def _names(self, folder: str) -> list[str]:
        return [name for name in self._storage.files(folder) if name not in _HIDDEN]

    def _query(self, folder: str, name: str, expires: int) -> str:
        return urlencode({"expires": expires, "signature": self._sign(folder, name, expires)})

    def _sign(self, folder: str, name: str, expires: int) -> str:
        message = f"{folder}\n{name}\n{expires}".encode()
        return hmac.new(self._secret, message, hashlib.sha256).hexdigest()


def load_secret(path: Path) -> bytes:
    """The signing secret, made on first use and readable by its owner alone."""
    if path.exists() and len(secret := path.read_bytes()) == _SECRET_BYTES:
        return secret
    secret = secrets.token_bytes(_SECRET_BYTES)
    part = path.with_name(f"{path.name}.part")
    part.unlink(missing_ok=True)
    with os.fdopen(os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
        file.write(secret)
    # Whole or not at all: a crash must not leave an empty secret, which anyone can sign with.
    part.replace(path)
    return secret
