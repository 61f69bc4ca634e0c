"""SFT clients against any server that speaks the Tinker API: how its throughput grows with them.

    python tests/benchmarks/bench_clients.py --url URL --model NAME [--pid PID] [--clients 1,2,4,8]

Needs the SDK and nothing else, in the version that the server understands; `make bench-peer` finds
one. Each client has a session and an adapter of its own, sends forward_backward and optim_step
together, and waits for both. A round is one step of every client; T(N) / T(1) says how much longer
it takes with N clients than with one. A server that takes them one after another comes to N.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import tinker
from tinker import types

ADAM = types.AdamParams(learning_rate=1e-4, beta1=0.9, beta2=0.95, eps=1e-8)


@dataclass(frozen=True)
class Point:
    """What so many clients came to."""

    clients: int
    tokens_per_s: float
    """Of the steps that all clients together finished."""
    round_s: float
    processor_s: float | None
    """Of the server and its children, a round; None where its process is not known."""
    over_one: float
    """T(N) / T(1)"""
    errors: tuple[str, ...]


class Client:
    """One user: a session, an adapter, and the same batch at every step."""

    def __init__(self, number: int, options: argparse.Namespace) -> None:
        # Kept: a service client that nobody holds any more may end its session.
        self._service = tinker.ServiceClient(base_url=options.url, api_key=options.key)
        self._run = settle(
            self._service.create_lora_training_client(options.model, rank=options.rank)
        )
        rng = random.Random(number)
        self._data = [_datum(rng, options.length) for _ in range(options.batch)]
        self.steps_done = 0

    def steps(self, count: int) -> None:
        for _ in range(count):
            passed = self._run.forward_backward(self._data, "cross_entropy")
            stepped = self._run.optim_step(ADAM)
            settle(passed)
            settle(stepped)
            self.steps_done += 1


def main() -> None:
    options = _parse()
    print(f"SDK {tinker.__version__}, {options.batch} x {options.length} tokens a step")
    print(f"{'clients':>7}{'tokens/s':>11}{'s a round':>11}{'CPU s':>8}{'T(N)/T(1)':>11}  errors")
    clients: list[Client] = []
    points: list[Point] = []
    for count in options.clients:
        clients += [Client(number, options) for number in range(len(clients), count)]
        points.append(_measure(clients[:count], options, points[0].round_s if points else None))
        print(_line(points[-1]), flush=True)
    if options.out:
        options.out.write_text(json.dumps([asdict(point) for point in points], indent=2) + "\n")
    sys.stdout.flush()
    # Not sys.exit: some versions of the SDK have threads that never end.
    os._exit(any(point.errors for point in points))


def settle(value: Any) -> Any:
    """The result, whether this SDK gives a future or the thing itself."""
    return value.result() if hasattr(value, "result") else value


def _datum(rng: random.Random, length: int) -> types.Datum:
    tokens = [rng.randrange(10, 200) for _ in range(length + 1)]
    inputs: dict[str, Any] = {"target_tokens": tokens[1:], "weights": [1.0] * length}
    return types.Datum(model_input=types.ModelInput.from_ints(tokens[:-1]), loss_fn_inputs=inputs)


def _measure(clients: Sequence[Client], options: argparse.Namespace, one_s: float | None) -> Point:
    """`one_s`: seconds a round with the first number of clients, None when these are they."""
    errors = _together(clients, 1)  # what is made at first use is not the load's
    done = sum(client.steps_done for client in clients)
    used, began = _processor_s(options.pid), time.perf_counter()
    errors += _together(clients, options.steps)
    wall_s = time.perf_counter() - began
    round_s = wall_s / options.steps
    processor_s = (_processor_s(options.pid) - used) / options.steps if options.pid else None
    done = sum(client.steps_done for client in clients) - done
    return Point(
        clients=len(clients),
        tokens_per_s=done * options.batch * options.length / wall_s,
        round_s=round_s,
        processor_s=processor_s,
        over_one=round_s / (one_s or round_s),
        errors=tuple(errors),
    )


def _together(clients: Sequence[Client], steps: int) -> list[str]:
    """Let every client take its steps; what went wrong, of the clients that failed."""
    with ThreadPoolExecutor(len(clients)) as pool:
        ended = [pool.submit(client.steps, steps) for client in clients]
    return [repr(error) for one in ended if (error := one.exception()) is not None]


def _line(point: Point) -> str:
    processor = "" if point.processor_s is None else f"{point.processor_s:.2f}"
    numbers = f"{point.clients:>7}{point.tokens_per_s:>11.1f}{point.round_s:>11.2f}{processor:>8}"
    return f"{numbers}{point.over_one:>11.2f}  {' | '.join(point.errors[:1]) or 'none'}"


def _processor_s(pid: int | None) -> float:
    """Seconds that a process and all its descendants have used so far; Linux only."""
    if pid is None:
        return 0.0
    ticks: dict[int, int] = {}
    parents: dict[int, int] = {}
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            fields = (entry / "stat").read_text().rsplit(")", 1)[1].split()
        except (FileNotFoundError, ProcessLookupError):
            continue  # it ended meanwhile
        parents[int(entry.name)] = int(fields[1])
        ticks[int(entry.name)] = int(fields[11]) + int(fields[12])
    family = {pid}
    while more := {child for child, parent in parents.items() if parent in family} - family:
        family |= more
    return sum(ticks[one] for one in family) / os.sysconf("SC_CLK_TCK")


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--url", required=True)
    parser.add_argument("--model", required=True, help="its name on the server")
    parser.add_argument("--key", default=os.environ.get("TINKER_API_KEY", "tml-benchmark"))
    parser.add_argument("--pid", type=int, help="of the server, if it runs on this machine")
    parser.add_argument("--clients", type=_counts, default=[1, 2, 4, 8])
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--batch", type=int, default=4, help="sequences a step")
    parser.add_argument("--length", type=int, default=128, help="tokens a sequence")
    parser.add_argument("--rank", type=int, default=8)
    parser.add_argument("--out", type=Path, help="JSON file")
    return parser.parse_args()


def _counts(text: str) -> list[int]:
    return [int(part) for part in text.split(",")]


if __name__ == "__main__":
    main()
