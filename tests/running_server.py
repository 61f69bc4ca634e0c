"""A real server process for tests: start it, talk to it, kill it, start it again."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

READY = re.compile(r"Hearth is ready at (http://\S+)")
START_TIMEOUT_S = 600


class RunningServer:
    """`hearth serve` on a data folder. `url` stays the same over restarts, as clients need."""

    def __init__(
        self,
        data: Path,
        models: dict[str, Path],
        settings: dict[str, str] | None = None,
        threads: int = 1,
        options: Sequence[str] = (),
    ):
        self.data = data
        self.models = models
        self.threads = threads
        self.settings = settings or {}
        self.options = options
        self.keys: dict[str, str] = {}
        self.url = ""
        self._port = 0
        self._process: subprocess.Popen[str] | None = None

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    @property
    def log(self) -> Path:
        return self.data.parent / f"{self.data.name}.log"

    def start(self) -> None:
        arguments = [sys.executable, "-m", "server.cli", "serve"]
        for name, path in self.models.items():
            arguments += ["--model", f"{name}={path}"]
        arguments += ["--port", str(self._port), "--data", str(self.data)]
        arguments += ["--threads", str(self.threads), *self.options]
        written = self.log.stat().st_size if self.log.exists() else 0
        with self.log.open("a") as output:
            self._process = subprocess.Popen(
                arguments,
                stdout=output,
                stderr=output,
                text=True,
                env={**os.environ, **self.settings, "HF_HUB_OFFLINE": "1"},
            )
        self.url = self._wait_ready(written)
        self._port = int(self.url.rsplit(":", 1)[1])

    def create_key(self, tenant: str) -> str:
        """A new API key, also kept in `keys`."""
        arguments = ["-m", "server.cli", "keys", "create", tenant, "--data", str(self.data)]
        made = subprocess.run(
            [sys.executable, *arguments], capture_output=True, text=True, check=True
        )
        self.keys[tenant] = made.stdout.strip()
        return self.keys[tenant]

    def interrupt(self, timeout_s: float = 60) -> int:
        """Ctrl-C; returns the exit status."""
        return self._end(signal.SIGINT, timeout_s)

    def kill(self) -> None:
        """kill -9, as a crash would."""
        self._end(signal.SIGKILL, 10)

    def worker_pids(self) -> list[int]:
        """The processes that hold the models."""
        found = []
        for entry in Path("/proc").iterdir():
            if not entry.name.isdigit():
                continue
            try:
                words = (entry / "stat").read_text().rsplit(")", 1)[1].split()
                command = (entry / "cmdline").read_text()
            except (FileNotFoundError, ProcessLookupError):
                continue
            if int(words[1]) == self.pid and "backends.workers.main" in command:
                found.append(int(entry.name))
        return found

    def _end(self, number: signal.Signals, timeout_s: float) -> int:
        assert self._process is not None
        if self._process.poll() is None:
            self._process.send_signal(number)
        return self._process.wait(timeout_s)

    def _wait_ready(self, written: int) -> str:
        assert self._process is not None
        deadline = time.monotonic() + START_TIMEOUT_S
        while time.monotonic() < deadline:
            output = self.log.read_text()[written:]
            if found := READY.search(output):
                return found[1]
            if self._process.poll() is not None:
                raise AssertionError(f"the server ended: {output[-2000:]}")
            time.sleep(0.1)
        raise AssertionError(f"the server was not ready in {START_TIMEOUT_S} s")
