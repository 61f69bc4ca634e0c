"""The first run: start a server, train on it with `sft.py`, stop it, say where everything is.

`make quickstart` starts this. Whatever is put behind it goes to `sft.py`, for example
`python client_examples/quickstart.py --steps 4`.
"""

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Never

from rich.console import Console
from rich.markup import escape

ROOT = Path(__file__).resolve().parents[1]
BASE_MODEL = "HuggingFaceTB/SmolLM2-135M-Instruct"
MODEL_DIR = Path("models") / BASE_MODEL
OUT = Path("quickstart-out")
LOG = OUT / "server.log"

READY = re.compile(r"Hearth is ready at (http://\S+)")
START_TIMEOUT_S = 300
STOP_TIMEOUT_S = 60

console = Console(highlight=False, soft_wrap=True)


def child_environment() -> dict[str, str]:
    """Loopback goes around any proxy, the model hub is never asked, and output comes at once."""
    no_proxy = ",".join(
        filter(None, [os.environ.get("NO_PROXY") or os.environ.get("no_proxy"), "127.0.0.1"])
    )
    return os.environ | {
        "NO_PROXY": no_proxy,
        "no_proxy": no_proxy,
        "HF_HUB_OFFLINE": "1",
        "PYTHONUNBUFFERED": "1",
    }


@contextmanager
def running_server(environment: Mapping[str, str]) -> Generator[str]:
    """Start `hearth serve` on a free port and give its URL; it is stopped whatever happens.

    It gets a process group of its own, so that a Ctrl-C reaches it once, from here, and it can
    finish what it is doing.
    """
    command = [sys.executable, "-m", "server.cli", "serve"]
    command += ["--model", f"{BASE_MODEL}={MODEL_DIR}", "--port", "0", "--data", str(OUT / "data")]
    with LOG.open("w", encoding="utf-8") as log:
        server = subprocess.Popen(
            command,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    try:
        yield wait_until_ready(server)
    finally:
        stop(server)


def wait_until_ready(server: subprocess.Popen[bytes]) -> str:
    """Show the server's last words until it says where it listens."""
    started = time.monotonic()
    with console.status("Starting the server") as status:
        while (waited_s := time.monotonic() - started) < START_TIMEOUT_S:
            text = LOG.read_text(encoding="utf-8", errors="replace")
            if match := READY.search(text):
                console.print(f"The server is ready at {match[1]} after {waited_s:.0f} s.")
                return match[1]
            if server.poll() is not None:
                give_up(f"The server ended with status {server.returncode}.")
            last_line = next(iter(text.splitlines()[-1:]), "")
            status.update(f"Starting the server, {waited_s:.0f} s  {escape(last_line[:60])}")
            time.sleep(0.2)
    give_up(f"The server was not ready within {START_TIMEOUT_S} s.")


def give_up(reason: str) -> Never:
    """End with the reason and the last lines of the server's log."""
    lines = LOG.read_text(encoding="utf-8", errors="replace").splitlines()[-20:]
    sys.exit("\n".join([reason, f"The last lines of {LOG}:", *(f"  {line}" for line in lines)]))


def stop(server: subprocess.Popen[bytes]) -> None:
    """Ask the server to finish; a second Ctrl-C, or a minute without an end, kills it."""
    if server.poll() is not None:
        return
    console.print("Stopping the server ...")
    server.send_signal(signal.SIGINT)
    try:
        server.wait(STOP_TIMEOUT_S)
    except (subprocess.TimeoutExpired, KeyboardInterrupt):
        console.print("It does not stop by itself: killing it.")
        os.killpg(server.pid, signal.SIGKILL)  # its own group: see running_server
        server.wait()


def train(base_url: str, environment: Mapping[str, str]) -> int:
    """Run the example as any user would; returns its exit status."""
    script = Path("client_examples") / "sft.py"
    command = [sys.executable, str(script), "--base-url", base_url, "--base-model", BASE_MODEL]
    command += ["--out", str(OUT), *sys.argv[1:]]
    console.print(f"Running {' '.join(['python', *command[1:]])}\n")
    return subprocess.run(command, env=environment, check=False).returncode


def say_where() -> None:
    result = json.loads((OUT / "result.json").read_text(encoding="utf-8"))
    console.print("\nWhere everything is")
    console.print(f"  loss curve   {OUT / 'loss.png'}")
    console.print(f"  all numbers  {OUT / 'result.json'}")
    console.print(f"  checkpoint   {result['state_path']}, in {OUT / 'data'}")
    console.print(f"  server log   {LOG}")
    console.print("\nTo serve the same data again, checkpoint included:")
    console.print(
        f"  .venv/bin/hearth serve --model {BASE_MODEL}={MODEL_DIR} --data {OUT / 'data'}"
    )


def main() -> None:
    os.chdir(ROOT)
    # Set by hand: a shell starts background jobs with SIGINT ignored, and children inherit that.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    if not (MODEL_DIR / "config.json").is_file():
        sys.exit(f"There is no model in {MODEL_DIR}: run `make model` first.")
    OUT.mkdir(exist_ok=True)
    environment = child_environment()
    try:
        with running_server(environment) as base_url:
            status = train(base_url, environment)
    except KeyboardInterrupt:
        sys.exit(128 + signal.SIGINT)
    if status != 0:
        sys.exit(f"sft.py ended with status {status}; the server's side is in {LOG}.")
    say_where()


if __name__ == "__main__":
    main()
