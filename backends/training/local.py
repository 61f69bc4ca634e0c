"""The trainer of one process, which has all of the model."""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence

from backends.model import FrozenModel
from backends.training.activations import Activations, Checkpointing
from backends.training.lane import Lane
from backends.training.packed_pass import PackedPass
from backends.training.ranks import Alone
from backends.training.trainer import Trainer


def local_trainer(
    model: FrozenModel,
    max_tokens_per_microbatch: int,
    activation_checkpointing: Checkpointing = "auto",
    device_bytes: int | None = None,
) -> Trainer:
    """`device_bytes` as in `Trainer`."""
    activations = Activations(model, activation_checkpointing)
    passes = _LocalPasses(model, activations, max_tokens_per_microbatch)
    return Trainer(model, passes, Alone(), device_bytes)


class _LocalPasses:
    def __init__(self, model: FrozenModel, activations: Activations, max_tokens: int) -> None:
        self._model = model
        self._activations = activations
        self._max_tokens = max_tokens

    def __call__(
        self, lanes: Sequence[Lane], make_room: Callable[[], bool]
    ) -> Generator[None, None, None]:
        packed = PackedPass(self._model, lanes, self._activations, make_room)
        return packed.run(self._max_tokens)
