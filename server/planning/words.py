"""Numbers as text."""

from __future__ import annotations


def counted(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"


def gib(num_bytes: float) -> str:
    return f"{num_bytes / 2**30:,.1f} GiB"
