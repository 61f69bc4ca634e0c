"""The losses by the names clients ask for."""

from __future__ import annotations

from backends.losses import cispo, cross_entropy, dro, gspo, importance_sampling, ppo
from backends.losses.base import Loss as Loss

LOSSES: dict[str, Loss] = {
    "cross_entropy": cross_entropy.LOSS,
    "importance_sampling": importance_sampling.LOSS,
    "ppo": ppo.LOSS,
    "cispo": cispo.LOSS,
    "dro": dro.LOSS,
    "gspo": gspo.LOSS,
}
