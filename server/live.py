"""How the commands of one machine find the server that runs on a data folder.

A server that is ready leaves its address and a token of its own in the folder, for the owner of
the process alone; they are gone, or worthless, when it is. The token also lies alone in a file, for
what can read a credential from one and nothing else.
"""

from __future__ import annotations

import json
import os
import urllib.request
from dataclasses import asdict, dataclass
from http import HTTPStatus
from pathlib import Path
from typing import Any
from urllib.error import HTTPError, URLError

_FILE = "live.json"
_TOKEN_FILE = "operator.token"
_TIMEOUT_S = 10.0
_CONTROL_S = 150.0
"""An engine takes a while to stop what it does."""
# The server is on this machine or this network: a proxy of the user's is not on the way.
_OPENER = urllib.request.build_opener(urllib.request.ProxyHandler({}))


@dataclass(frozen=True, slots=True)
class LiveServer:
    address: str
    token: str

    def announce(self, data: Path) -> None:
        _write(data / _TOKEN_FILE, self.token)
        _write(data / _FILE, json.dumps(asdict(self)))

    @classmethod
    def find(cls, data: Path) -> LiveServer | None:
        try:
            return cls(**json.loads((data / _FILE).read_text()))
        except FileNotFoundError:
            return None

    def get(self, path: str) -> Any:
        """What `/operator/<path>` says, or None when that server is not there any more. Raises
        HTTPError for what a server that is there cannot answer."""
        return self._ask("GET", path, _TIMEOUT_S)

    def post(self, path: str) -> Any:
        """Have something done. Answers and raises like `get`."""
        return self._ask("POST", path, _CONTROL_S)

    def _ask(self, method: str, path: str, timeout_s: float) -> Any:
        request = urllib.request.Request(
            f"{self.address}/operator/{path}",
            headers={"authorization": f"Bearer {self.token}"},
            method=method,
        )
        try:
            with _OPENER.open(request, timeout=timeout_s) as answer:
                return json.load(answer)
        except HTTPError as error:
            if error.code == HTTPStatus.UNAUTHORIZED:  # another server has the port now
                return None
            raise
        except URLError:
            return None


def withdraw(data: Path) -> None:
    """The server on this folder is over."""
    for name in (_FILE, _TOKEN_FILE):
        (data / name).unlink(missing_ok=True)


def _write(path: Path, text: str) -> None:
    """For the owner of the process alone; there whole or not at all."""
    part = path.with_name(f"{path.name}.part")
    part.unlink(missing_ok=True)
    with os.fdopen(os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
        file.write(text)
    part.replace(path)
