"""The losses by the names clients ask for."""

from __future__ import annotations

from backends.contract import ForwardBackward
from backends.losses import (
    cispo,
    cross_entropy,
    dro,
    gspo,
    importance_sampling,
    ppo,
    stable_reinforce,
)
from backends.losses.base import Loss as Loss
from backends.losses.graph import custom_loss

LOSSES: dict[str, Loss] = {
    "cross_entropy": cross_entropy.LOSS,
    "importance_sampling": importance_sampling.LOSS,
    "ppo": ppo.LOSS,
    "cispo": cispo.LOSS,
    "dro": dro.LOSS,
    "gspo": gspo.LOSS,
    "stable_reinforce": stable_reinforce.LOSS,
}


def loss_of(request: ForwardBackward) -> Loss:
    """Raises LossRefusedError when the request brings a graph that is not allowed."""
    if request.custom_loss is not None:
        return custom_loss(request.custom_loss, request.num_data)
    return LOSSES[request.loss]
