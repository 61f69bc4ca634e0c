"""Exported weights for certain eyes only: every file encrypted with age (age-encryption.org)."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Sequence
from pathlib import Path

import pyrage

from server.core.errors import BadInput

MAX_RECIPIENTS = 10
SUFFIX = ".age"
HIDDEN = frozenset({"hearth.json"})
"""Facts for this server alone, which reads no export again."""
_PRIVATE = ("AGE-SECRET-KEY-", "-----BEGIN")

Recipient = pyrage.x25519.Recipient | pyrage.ssh.Recipient


def check_recipients(given: Sequence[str] | None) -> tuple[str, ...]:
    """The keys to encrypt to, each of which age can read; none for no encryption. Raises
    BadInput that names the first bad one."""
    given = tuple(given or ())
    if len(given) > MAX_RECIPIENTS:
        raise BadInput(
            f"age_encryption_recipients has {len(given)} entries; the limit is {MAX_RECIPIENTS}"
        )
    for index, text in enumerate(given):
        _recipient(f"age_encryption_recipients[{index}]", text)
    return given


async def encrypt_folder(source: Path, target: Path, recipients: Sequence[str]) -> int:
    """Encrypt every file of `source` into the new folder `target`; returns their bytes in all.

    The files are on disk when it returns; `source` is left to the caller."""
    keys = [_recipient("recipient", text) for text in recipients]
    return await asyncio.to_thread(_encrypt_all, source, target, keys)


def _recipient(where: str, text: str) -> Recipient:
    if text.startswith(_PRIVATE):
        # Not repeated: errors are logged by clients.
        raise BadInput(f"{where} is a private key; the public one is needed, age1... or ssh-...")
    kind = pyrage.ssh.Recipient if text.startswith("ssh-") else pyrage.x25519.Recipient
    try:
        return kind.from_str(text)
    except (pyrage.RecipientError, UnicodeEncodeError) as error:
        shown = ascii(text if len(text) <= 80 else f"{text[:77]}...")
        raise BadInput(
            f"{where} is {shown}, which is neither an age recipient (age1...) nor an SSH public "
            "key of type ed25519 or rsa"
        ) from error


def _encrypt_all(source: Path, target: Path, keys: list[Recipient]) -> int:
    target.mkdir()
    size = 0
    for file in sorted(source.iterdir()):
        if file.name in HIDDEN:
            continue
        encrypted = target / f"{file.name}{SUFFIX}"
        # Through Python's files rather than by path: pyrage holds the interpreter's lock, and
        # only these let go of it, so that the server answers meanwhile.
        with file.open("rb") as plain, encrypted.open("wb") as out:
            pyrage.encrypt_io(plain, out, keys)
            out.flush()
            os.fsync(out.fileno())
        size += encrypted.stat().st_size
    return size
