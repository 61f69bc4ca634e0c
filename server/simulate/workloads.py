"""What synthetic tenants ask for, and when. The same seed gives the same tenants."""

from __future__ import annotations

import contextlib
import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from random import Random

ROUND_TRIP_S = 0.02
"""Between a client and the server. The SDK sends a run's next request when the one before is
acknowledged, so pipelined requests arrive this far apart."""

RANKS = (8, 16, 32, 32, 64)
"""Drawn evenly; 32 is the SDK's default."""


@dataclass(frozen=True, slots=True)
class Step:
    """Forward_backwards, then an optimizer step, submitted without waiting in between."""

    batches: tuple[tuple[int, ...], ...]
    """For each forward_backward the lengths of its datums, in tokens."""

    @property
    def tokens(self) -> int:
        return sum(map(sum, self.batches))


@dataclass(frozen=True, slots=True)
class Round:
    """A client pauses, submits these steps at once, and waits for all of them."""

    pause_s: float
    steps: tuple[Step, ...]


@dataclass(frozen=True, slots=True)
class Workload:
    """How one kind of tenant behaves; lengths are in units of the machine's typical sequence."""

    about: str
    pause_s: Callable[[Random], float]
    num_steps: int = 1
    num_batches: int = 1
    """Forward_backwards of a step."""
    num_datums: int = 8
    length_sigma: float = 0.4
    """Of the lognormal lengths around the typical one: 1 gives a long tail."""

    def rounds(self, rng: Random, sequence_tokens: int) -> Iterator[Round]:
        """For ever. The first pause is cut short at random, so that nobody starts together."""
        for number in itertools.count():
            pause_s = self.pause_s(rng) * (1.0 if number else rng.random())
            steps = [self._step(rng, sequence_tokens) for _ in range(self.num_steps)]
            yield Round(pause_s, tuple(steps))

    def _step(self, rng: Random, sequence_tokens: int) -> Step:
        def length() -> int:
            drawn = sequence_tokens * rng.lognormvariate(0.0, self.length_sigma)
            return min(max(round(drawn), 1), 16 * sequence_tokens)

        return Step(
            tuple(tuple(length() for _ in range(self.num_datums)) for _ in range(self.num_batches))
        )


WORKLOADS: Mapping[str, Workload] = {
    "sft": Workload("one step after the other", pause_s=lambda rng: 0.1),
    "rl": Workload(
        "32 rollouts of very different lengths, then half a minute of sampling elsewhere",
        pause_s=lambda rng: rng.lognormvariate(math.log(30.0), 0.5),
        num_datums=32,
        length_sigma=1.0,
    ),
    "burst": Workload(
        "idle for five minutes, then ten steps at once",
        pause_s=lambda rng: rng.expovariate(1 / 300),
        num_steps=10,
    ),
    "flood": Workload(
        "200 batches at once, then one step; again ten minutes later",
        pause_s=lambda rng: rng.expovariate(1 / 600),
        num_batches=200,
    ),
    "tail": Workload(
        "a single small step every ten minutes",
        pause_s=lambda rng: rng.expovariate(1 / 600),
        num_datums=4,
    ),
}

DEFAULT_MIX: Mapping[str, float] = {
    "sft": 0.03,
    "rl": 0.03,
    "burst": 0.05,
    "flood": 0.005,
    "tail": 0.885,
}


def mix_of(text: str) -> dict[str, float]:
    """`sft=3,tail=7` as proportions. Raises ValueError for anything else."""
    shares = {}
    for part in text.split(","):
        kind, _, share = part.partition("=")
        if kind not in WORKLOADS:
            raise ValueError(f"{part!r} in the mix: a kind is one of {', '.join(WORKLOADS)}")
        shares[kind] = number(share)
    if not any(shares.values()):
        raise ValueError(f"{text!r} is a mix of nobody")
    return shares


def number(text: str) -> float:
    """A finite number from 0 on, or ValueError."""
    with contextlib.suppress(ValueError):
        if 0 <= (value := float(text)) < math.inf:
            return value
    raise ValueError(f"{text!r} is no number from 0 on")


@dataclass(frozen=True, slots=True, kw_only=True)
class Tenant:
    """One tenant with one run."""

    number: int
    kind: str
    """A key of WORKLOADS."""
    weight: float
    rank: int
    seed: int

    def rounds(self, sequence_tokens: int) -> Iterator[Round]:
        return WORKLOADS[self.kind].rounds(Random(self.seed), sequence_tokens)


def crowd(
    size: int, seed: int, mix: Mapping[str, float] = DEFAULT_MIX, weights: Sequence[float] = (1.0,)
) -> list[Tenant]:
    """That many tenants in the proportions of `mix`; they take the weights in turn."""
    rng = Random(seed)
    return [
        Tenant(
            number=number,
            kind=kind,
            weight=weights[number % len(weights)],
            rank=rng.choice(RANKS),
            seed=rng.getrandbits(64),
        )
        for number, kind in enumerate(_kinds(size, mix))
    ]


def _kinds(size: int, mix: Mapping[str, float]) -> list[str]:
    """Whole numbers of each kind, the largest remainders rounded up, at least one of each kind
    that is in the mix where there are tenants enough."""
    wanted = {kind: mix[kind] for kind in WORKLOADS if mix.get(kind)}
    total = sum(wanted.values())
    counts = dict.fromkeys(wanted, 1 if size >= len(wanted) else 0)
    for _ in range(size - sum(counts.values())):
        short = max(counts, key=lambda kind: wanted[kind] / total * size - counts[kind])
        counts[short] += 1
    return [kind for kind in wanted for _ in range(counts[kind])]
