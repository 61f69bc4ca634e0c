"""How a trainer lays the base model and the adapters over its ranks: numbers on each of them."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from server.planning import linears
from server.planning.shapes import ModelShape

GPUS_OF_NODE = 8
"""Tensor parallel waits for every other rank several times a layer: it stays on NVLink."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """Of Megatron's axes. The world is tensor x pipeline x data; expert divides data."""

    tensor: int = 1
    pipeline: int = 1
    data: int = 1
    expert: int = 1

    @property
    def world(self) -> int:
        return self.tensor * self.pipeline * self.data

    def refusal(self, shape: ModelShape) -> str | None:
        """Why this model cannot be cut so, or None."""
        for name, count, size in (
            ("num_attention_heads", shape.num_heads, self.tensor),
            ("num_key_value_heads", shape.num_kv_heads, self.tensor),
            ("num_hidden_layers", shape.num_layers, self.pipeline),
            ("num_experts", shape.num_experts or 1, self.expert),
            ("the data-parallel size", self.data, self.expert),
        ):
            if count % size:
                return f"{name} {count} is not a multiple of {size}"
        if self.tensor > GPUS_OF_NODE:
            return f"tensor parallel {self.tensor} is more than the {GPUS_OF_NODE} GPUs of a node"
        return None


def possible(shape: ModelShape, gpus: int) -> list[Sizes]:
    """All that Megatron can do on so many GPUs: the fewest that share one token first, those
    without pipeline before those with, the most ranks for experts."""
    found = [
        Sizes(tensor=tensor, pipeline=pipeline, data=gpus // (tensor * pipeline), expert=expert)
        for tensor in _divisors(gpus)
        for pipeline in _divisors(gpus // tensor)
        for expert in _divisors(gpus // (tensor * pipeline))
        if expert == 1 or shape.experts
    ]
    allowed = [sizes for sizes in found if sizes.refusal(shape) is None]
    return sorted(allowed, key=lambda s: (s.tensor * s.pipeline, s.pipeline, -s.expert))


def _divisors(number: int) -> list[int]:
    return [d for d in range(1, number + 1) if number % d == 0]


@dataclass(frozen=True, slots=True)
class Stage:
    """Consecutive layers on the ranks of one pipeline stage."""

    number: int
    layers: range
    sizes: Sizes

    @property
    def first(self) -> bool:
        return self.number == 0

    @property
    def last(self) -> bool:
        return self.number == self.sizes.pipeline - 1


def stages(shape: ModelShape, sizes: Sizes) -> list[Stage]:
    each = shape.num_layers // sizes.pipeline
    return [Stage(i, range(i * each, (i + 1) * each), sizes) for i in range(sizes.pipeline)]


def base_parameters(shape: ModelShape, stage: Stage | None = None) -> int:
    """Of the whole model, or on one rank of a stage."""
    stage = stage or stages(shape, Sizes())[0]
    sizes = stage.sizes
    layers = sum(layer_parameters(shape, layer, sizes) for layer in stage.layers)
    vocabulary = linears.head(shape).parameters(sizes.tensor)
    # A tied head on another stage than the embedding is a copy of it.
    copies = stage.first + (stage.last and not (shape.tied and stage.first))
    return layers + copies * vocabulary + stage.last * shape.hidden_size


def layer_parameters(shape: ModelShape, layer: int, sizes: Sizes | None = None) -> int:
    """Norms and router are whole on every rank."""
    sizes = sizes or Sizes()
    products = linears.of_layer(shape, layer, sizes.expert)
    norms = 2 * shape.hidden_size + (2 * shape.head_dim if shape.qk_norm else 0)
    router = shape.hidden_size * shape.num_experts if layer in shape.expert_layers else 0
    return norms + router + sum(one.parameters(sizes.tensor) for one in products)


def adapter_numbers(
    shape: ModelShape, rank: int, groups: Collection[str], stage: Stage | None = None
) -> int:
    """Of one adapter: whole, or on one rank of a stage."""
    stage = stage or stages(shape, Sizes())[0]
    sizes = stage.sizes
    products: list[linears.Linear] = [
        one for layer in stage.layers for one in linears.of_layer(shape, layer, sizes.expert)
    ]
    if stage.last:
        products.append(linears.head(shape))
    return linears.adapter_numbers(products, rank, groups, sizes.tensor)


def largest_layer(shape: ModelShape) -> int:
    """Parameters of the largest one."""
    return max(layer_parameters(shape, layer) for layer in shape.kinds_of_layer)
