"""What a request cost, in the units that usage is told in."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampled:
    """The tokens of one sample request, all its sequences together."""

    prompt: int
    cached: int
    """Those of the prompt that came out of the prefix cache."""
    generated: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Counts:
    """What one request, or many, used."""

    trained: int = 0
    """Tokens of forward and forward_backward passes."""
    prefilled: int = 0
    """Prompt tokens that were computed."""
    prefilled_cached: int = 0
    """Prompt tokens that came out of the prefix cache."""
    sampled: int = 0
    checkpoints: int = 0
    """Checkpoints written under a name."""

    def __bool__(self) -> bool:
        return self != Counts()
