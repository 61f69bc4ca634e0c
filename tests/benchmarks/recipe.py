"""The SFT run that goes through the service in one process and a bare loop in another."""

from __future__ import annotations

import numpy as np

RANK, BATCH, LENGTH = 32, 4, 128
LEARNING_RATE, BETAS, EPS = 1e-4, (0.9, 0.95), 1e-8
# Not the API's default eps of 1e-12: beside it the rounding of a gradient near 0 decides the step.


def batch(vocab_size: int) -> np.ndarray:
    """int64[BATCH, LENGTH + 1]: inputs are all but the last token, targets all but the first."""
    return np.random.default_rng(0).integers(0, vocab_size, (BATCH, LENGTH + 1))
