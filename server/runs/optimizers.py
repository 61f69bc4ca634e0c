"""Which optimizers can be chosen, and what a resumed run may choose."""

from __future__ import annotations

from reprlib import repr as brief

from server.core.errors import BadInput
from server.core.optimizers import ADAMW, Optimizer
from server.core.records import Checkpoint
from server.runs import wire

_DIMUON_VERSION = 1


def chosen(config: wire.OptimizerConfig | None) -> Optimizer:
    """What an `optimizer_config` names; without one it is AdamW. Raises BadInput for what this
    server cannot compute."""
    if config is None:
        return ADAMW
    match config.type:
        case "adamw" if config.version is None:
            return ADAMW
        case "adamw":
            raise BadInput(f"optimizer_config.version: is {config.version}; adamw has no versions.")
        case "dimuon" if config.version in (None, _DIMUON_VERSION):
            raise BadInput(
                "optimizer_config.type: is 'dimuon'; this server has adamw only, because the "
                "update rule of Dimuon is not published."
            )
        case "dimuon":
            raise BadInput(
                f"optimizer_config.version: is {config.version}; "
                f"the only version of dimuon is {_DIMUON_VERSION}."
            )
    raise BadInput(f"optimizer_config.type: is {brief(config.type)}; available is adamw.")


def resumed(
    source: Checkpoint, *, with_state: bool, config: wire.OptimizerConfig | None
) -> Optimizer:
    """The optimizer of a run that starts from a checkpoint.

    "Cannot override restored optimizer state" (tinker SDK 0.38, `LoadWeightsRequest`): with its
    state the run keeps the checkpoint's optimizer, with weights alone it is free.
    """
    asked = chosen(config)
    if not with_state:
        return asked
    if config is not None and asked != source.optimizer:
        raise BadInput(
            f"optimizer_config: is {asked}; {source.path} holds the state of {source.optimizer}, "
            f"which goes with that optimizer only (optimizer=false starts with new state)."
        )
    return source.optimizer
