"""One run's LoRA weights, and how they start.

Shapes: I in, O out, R rank. Every targeted linear computes y = W x + alpha / R * B (A x).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from backends.contract import AdapterSpec

UNEMBED = "lm_head"
"""The module name of the unembedding, whatever the base model."""


class LoRAPair(NamedTuple):
    a: Tensor
    """float32[R, I]"""
    b: Tensor
    """float32[O, R]"""


@dataclass(frozen=True, slots=True)
class Target:
    """A linear layer of the base model that adapters may change."""

    name: str
    group: str
    """`attn`, `mlp` or `unembed`."""
    in_features: int
    out_features: int


@dataclass(frozen=True, slots=True)
class Adapter:
    """The pairs of one adapter by module name; modules it does not train are absent."""

    spec: AdapterSpec
    pairs: Mapping[str, LoRAPair]

    @property
    def scale(self) -> float:
        return self.spec.alpha / self.spec.rank

    def named_tensors(self) -> Iterator[tuple[str, Tensor]]:
        """`<module>.lora_A.weight` and `<module>.lora_B.weight`, in the model's own order."""
        for name, pair in self.pairs.items():
            yield f"{name}.lora_A.weight", pair.a
            yield f"{name}.lora_B.weight", pair.b

    def lane(self) -> Adapter:
        """The same weights as fresh autograd leaves, so that one request's gradient stays its
        own until the request is known to be good."""
        return Adapter(
            self.spec,
            {
                name: LoRAPair(*(t.detach().requires_grad_() for t in pair))
                for name, pair in self.pairs.items()
            },
        )


def trained_targets(spec: AdapterSpec, targets: tuple[Target, ...]) -> list[Target]:
    groups = {
        group
        for group, wanted in (
            ("attn", spec.train_attn),
            ("mlp", spec.train_mlp),
            ("unembed", spec.train_unembed),
        )
        if wanted
    }
    return [target for target in targets if target.group in groups]


def fresh_adapter(spec: AdapterSpec, targets: tuple[Target, ...], device: torch.device) -> Adapter:
    """A ~ U(-1/sqrt(I), 1/sqrt(I)), B = 0, as in "LoRA Without Regret" (Schulman et al.,
    Thinking Machines, 2025; the same as peft's default). Drawn on the CPU in the order of
    `targets`, so a seed gives the same adapter on every device."""
    generator = torch.Generator().manual_seed(spec.seed)
    pairs = {}
    for target in trained_targets(spec, targets):
        bound = target.in_features**-0.5
        a = torch.empty(spec.rank, target.in_features).uniform_(-bound, bound, generator=generator)
        b = torch.zeros(target.out_features, spec.rank, device=device)
        pairs[target.name] = LoRAPair(a.to(device), b)
    return Adapter(spec, pairs)
