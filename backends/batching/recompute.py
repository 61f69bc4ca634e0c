"""Activation checkpointing: a decoder layer keeps its input alone, and backward computes it again.

transformers has a switch for this as well, but only for models in training mode.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any

from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from backends.lora.linear import Segments
from backends.lora.parts import Part


@contextmanager
def current(segments: Segments, those: Sequence[Part]) -> Generator[None]:
    """Those segments are what the layers see, until the end of the context."""
    before, segments.current = segments.current, tuple(those)
    try:
        yield
    finally:
        segments.current = before


class Recompute:
    """A switch for the layers of one model, off unless `turned` on for a forward."""

    def __init__(self, layers: Iterable[nn.Module], segments: Segments) -> None:
        self._on = False
        self._segments = segments
        for layer in layers:
            # Not a module around it: adapters go by the names of modules.
            layer.forward = partial(self._forward, layer.forward)

    @contextmanager
    def turned(self, on: bool) -> Generator[None]:
        before, self._on = self._on, on
        try:
            yield
        finally:
            self._on = before

    def _forward(self, forward: Callable[..., Tensor], *args: Any, **kwargs: Any) -> Tensor:
        if not self._on:
            return forward(*args, **kwargs)
        return checkpoint(
            forward,
            *args,
            use_reentrant=False,
            preserve_rng_state=False,  # nothing in these layers is random
            context_fn=self._contexts,
            **kwargs,
        )

    def _contexts(self) -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
        """Around the forward, and around its repetition in backward, when the segments of this
        pass are not the current ones any more."""
        return nullcontext(), current(self._segments, self._segments.current)
