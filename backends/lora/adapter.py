"""One run's LoRA weights, and how they start.

Shapes: I in, O out, R rank, P numbers of an adapter. Every targeted linear computes
y = W x + alpha / R * B (A x).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache, cached_property
from itertools import accumulate
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


@dataclass(frozen=True)
class Layout:
    """Where each module's A and B lie in the flat vector of P numbers that an adapter is: module
    after module, A before B, each matrix whole.

    A row by row, B column by column: so both have their R rows of contiguous numbers, and the
    product that makes the gradient of B, which has R as its short side, is up to five times
    faster (of 8192 tokens, R 8, O 64 on a CPU)."""

    rank: int
    modules: tuple[tuple[str, int, int], ...]
    """(name, I, O) of each, in the model's own order."""

    @classmethod
    @cache
    def of(cls, rank: int, modules: tuple[tuple[str, int, int], ...]) -> Layout:
        """One object for all adapters of one shape."""
        return cls(rank, modules)

    @cached_property
    def _starts(self) -> dict[str, tuple[int, int, int]]:
        sizes = [self.rank * (i + o) for _, i, o in self.modules]
        starts = accumulate(sizes, initial=0)
        modules = zip(self.modules, starts, strict=False)
        return {name: (start, i, o) for (name, i, o), start in modules}

    @property
    def names(self) -> Iterable[str]:
        """Of the modules."""
        return self._starts.keys()

    @cached_property
    def num_elements(self) -> int:
        return sum(self.rank * (i + o) for _, i, o in self.modules)

    def pair(self, flat: Tensor, module: str) -> LoRAPair:
        """Views a[..., R, I] and b[..., O, R] of flat[..., P]."""
        start, num_in, num_out = self._starts[module]
        size_a, size_b = self.rank * num_in, self.rank * num_out
        shape = flat.shape[:-1]
        return LoRAPair(
            flat.narrow(-1, start, size_a).view(*shape, self.rank, num_in),
            flat.narrow(-1, start + size_a, size_b).view(*shape, self.rank, num_out).mT,
        )

    def named_tensors(self, flat: Tensor) -> Iterator[tuple[str, Tensor]]:
        """Views of flat[P] as `<module>.lora_A.weight` and `<module>.lora_B.weight`; those of B
        are not contiguous."""
        for module in self.names:
            a, b = self.pair(flat, module)
            yield f"{module}.lora_A.weight", a
            yield f"{module}.lora_B.weight", b

    def flat(self, get: Callable[[str], Tensor]) -> Tensor:
        """float32[P] on the CPU of what `get` gives for the names above. Raises ValueError for a
        tensor of another shape."""
        flat = torch.empty(self.num_elements)
        for name, place in self.named_tensors(flat):
            tensor = get(name)
            if tensor.shape != place.shape:
                raise ValueError(f"{name} has shape {list(tensor.shape)}, not {list(place.shape)}")
            place.copy_(tensor)
        return flat


@dataclass(frozen=True)
class Adapter:
    """The weights of one adapter: one vector, so that whatever is done to all of them is done at
    once. Gradients and moments have the same layout."""

    spec: AdapterSpec
    layout: Layout
    flat: Tensor
    """[P], float32 where it is trained. [n, P] stands for n adapters of one layout and scale, all
    of whose tensors then begin with n."""

    @classmethod
    def of(cls, spec: AdapterSpec, pairs: Mapping[str, LoRAPair]) -> Adapter:
        """Copies the pairs, of one rank and in the model's own order; there is one at least."""
        modules = tuple((name, a.shape[1], b.shape[0]) for name, (a, b) in pairs.items())
        layout = Layout.of(next(iter(pairs.values())).a.shape[0], modules)
        tensors = {
            f"{name}.lora_{letter}.weight": matrix
            for name, pair in pairs.items()
            for letter, matrix in zip("AB", pair, strict=True)
        }
        return cls(spec, layout, layout.flat(tensors.__getitem__))

    @property
    def scale(self) -> float:
        return self.spec.alpha / self.spec.rank

    @cached_property
    def pairs(self) -> dict[str, LoRAPair]:
        """Views by module name; modules it does not train are absent."""
        return {module: self.layout.pair(self.flat, module) for module in self.layout.names}

    def named_tensors(self) -> Iterator[tuple[str, Tensor]]:
        return self.layout.named_tensors(self.flat)

    def to(self, target: torch.device | torch.dtype) -> Adapter:
        """Itself if there is nothing to change."""
        flat = self.flat.to(target)
        return self if flat is self.flat else Adapter(self.spec, self.layout, flat)


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
    trained = trained_targets(spec, targets)
    modules = tuple((t.name, t.in_features, t.out_features) for t in trained)
    layout = Layout.of(spec.rank, modules)
    flat = torch.zeros(layout.num_elements)
    for target in trained:
        bound = target.in_features**-0.5
        layout.pair(flat, target.name).a.uniform_(-bound, bound, generator=generator)
    return Adapter(spec, layout, flat.to(device))
