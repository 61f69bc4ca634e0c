"""Checks that training and sampling share."""

from __future__ import annotations

import numpy as np

from server.core.errors import BadInput


def first_position(bad: np.ndarray) -> tuple[int, ...]:
    """The index of the first true cell."""
    return tuple(int(axis) for axis in np.argwhere(bad)[0])


def shown(position: tuple[int, ...]) -> str:
    return ", ".join(map(str, position))


def check_token_ids(where: str, ids: np.ndarray, *, vocab_size: int, least: int = 0) -> None:
    """Raise BadInput for the first id outside [least, vocab_size), with its position."""
    if ids.size and (ids.min() < least or ids.max() >= vocab_size):
        position = first_position((ids < least) | (ids >= vocab_size))
        raise BadInput(
            f"{where}: token id {ids[position]} at position {shown(position)} is outside "
            f"{least} to {vocab_size - 1}."
        )
