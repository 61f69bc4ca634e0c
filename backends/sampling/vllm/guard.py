"""Runs a command that must not outlive whoever started this, however that ends: when standard input
is closed, the whole process group is killed. `python -I guard.py COMMAND...`"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading


def _watch() -> None:
    sys.stdin.buffer.read()
    os.killpg(0, signal.SIGKILL)


def main() -> int:
    # A signal to the group is for the command; a handler, unlike SIG_IGN, is not inherited.
    signal.signal(signal.SIGTERM, lambda *_: None)
    threading.Thread(target=_watch, daemon=True).start()
    return subprocess.Popen(sys.argv[1:], stdin=subprocess.DEVNULL).wait()


if __name__ == "__main__":
    code = main()
    # The watching thread holds standard input, which a normal exit would wait for.
    os._exit(code if code >= 0 else 128 - code)
