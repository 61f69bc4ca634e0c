"""How even service was: what each tenant got against what it was due."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np


def jain(shares: np.ndarray) -> float:
    """Jain's index of shares [N]: (sum x)^2 / (N sum x^2), 1 when all are equal, 1 / N when one
    has everything. Of nobody it is 1."""
    squares = float(np.square(shares).sum())
    return float(shares.sum()) ** 2 / (len(shares) * squares) if squares else 1.0


def fair_split(amount: float, wanted: np.ndarray, weights: np.ndarray) -> np.ndarray:
    """The weighted max-min fair split [N] of an amount among those who want `wanted` [N]: nobody
    gets more than that, and what one leaves goes to the others by weight."""
    level = wanted / weights
    if amount <= level.min() * weights.sum():
        return amount * weights / weights.sum()
    order = np.argsort(level)
    sorted_wanted, sorted_weights = wanted[order], weights[order]
    # Where all up to i are satisfied, and the rest stand at i's level.
    others = sorted_weights.sum() - np.cumsum(sorted_weights)
    needed = np.cumsum(sorted_wanted) + level[order] * others
    full = int(np.searchsorted(needed, amount, side="right"))
    if full == len(wanted):
        return wanted.astype(float)
    satisfied = sorted_wanted[:full].sum()
    return np.minimum(wanted, (amount - satisfied) / sorted_weights[full:].sum() * weights)


class Shares:
    """Tokens that each of N tenants got and was due. Due is the weighted max-min fair share of
    every pass among those who asked for any before it ended, each by the part of it that it was
    there: who is away between two requests for less than a pass misses little."""

    def __init__(self, weights: Sequence[float]) -> None:
        self._weights = np.array(weights)
        self.got = np.zeros(len(weights))
        self.due = np.zeros(len(weights))
        self._asked = np.zeros(len(weights))
        self._presence = np.zeros(len(weights))

    def begin(self, wanted: np.ndarray) -> None:
        """A pass begins while these tokens [N] wait, its own among them."""
        self._asked = wanted.copy()
        self._presence = (wanted > 0).astype(float)

    def join(self, tenant: int, tokens: int, presence: float) -> None:
        """More came while it ran, with that share of it left."""
        self._asked[tenant] += tokens
        self._presence[tenant] = max(self._presence[tenant], presence)

    def end(self, tokens: Mapping[int, int]) -> None:
        """The pass had these, by tenant."""
        asking = np.flatnonzero(self._presence)
        weights = self._weights[asking] * self._presence[asking]
        self.due[asking] += fair_split(sum(tokens.values()), self._asked[asking], weights)
        for tenant, taken in tokens.items():
            self.got[tenant] += taken

    def counted(self, least: float) -> np.ndarray:
        """Which tenants were due that many tokens: with less, the size of a request decides."""
        return self.due >= least

    def index(self, least: float) -> float:
        """Jain's index of got / due over those."""
        counted = self.counted(least)
        return jain(self.got[counted] / self.due[counted])
