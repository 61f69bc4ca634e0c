"""tinker:// paths and the names in them."""

from __future__ import annotations

import re
import unicodedata
from dataclasses import dataclass
from enum import StrEnum

from server.core.errors import BadInput
from server.core.ids import RunId

MAX_NAME_LENGTH = 128
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._\-+=@ ]*")
_RUN = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:\-]*")


class CheckpointKind(StrEnum):
    """What a checkpoint is for; the value is its segment in a tinker:// path."""

    TRAINING = "weights"
    """Weights and optimizer state, to resume from."""
    SAMPLER = "sampler_weights"
    """Weights to sample from."""
    EXTERNAL = "external_weights"
    """Weights to download."""


@dataclass(frozen=True, slots=True)
class CheckpointPath:
    """tinker://<run>/<kind>/<name>"""

    run: RunId
    kind: CheckpointKind
    name: str

    def __str__(self) -> str:
        return f"tinker://{self.run}/{self.kind}/{self.name}"


def parse_path(path: str) -> CheckpointPath:
    """Raises BadInput unless `path` has exactly the three segments."""
    scheme, _, rest = path.partition("://")
    segments = rest.split("/")
    if scheme != "tinker" or len(segments) != 3:
        raise BadInput(
            f"path {_shown(path)} is not of the form tinker://<training run>/<kind>/<name>"
        )
    run, kind, name = segments
    if not _RUN.fullmatch(run):
        raise BadInput(f"path {_shown(path)}: {_shown(run)} is not a training run id")
    return CheckpointPath(RunId(run), parse_kind(kind), check_name(name))


def parse_kind(kind: str) -> CheckpointKind:
    try:
        return CheckpointKind(kind)
    except ValueError:
        known = ", ".join(CheckpointKind)
        raise BadInput(f"checkpoint kind {_shown(kind)} is not one of {known}") from None


def check_name(name: str) -> str:
    """A checkpoint name as a client may choose it, or BadInput with the rule.

    ASCII only: two names that look alike are then the same name.
    """
    if not name:
        raise BadInput("checkpoint name is empty")
    if len(name) > MAX_NAME_LENGTH:
        raise BadInput(
            f"checkpoint name has {len(name)} characters; the limit is {MAX_NAME_LENGTH}"
        )
    if not _NAME.fullmatch(name) or ".." in name or name != name.strip():
        raise BadInput(
            f"checkpoint name {_shown(name)} is not allowed: it must start with an ASCII letter "
            "or digit and go on with letters, digits, spaces and . _ - + = @, without '..'"
        )
    return name


def _shown(text: str) -> str:
    """What the client sent, shortened and with control characters made visible."""
    short = text if len(text) <= 80 else text[:77] + "..."
    printable = (c if unicodedata.category(c)[0] != "C" else "\ufffd" for c in short)
    return repr("".join(printable))
