"""The experts of a layer under many adapters.

Ranks that share a layer's experts send each other tokens, so those of several microbatches meet in
an expert. All of these ranks know the same adapters in the same order, their own and those that
only others have tokens of (`passes.py`); and they tell each other how many of whose tokens go to
which expert. In an expert the rows of one rank lie in the order that they have there.

Shapes: T rows of this rank, H hidden size, E experts of the layer, K adapters, S ranks that send
each other tokens; N rows that came to the experts of this rank, n to one of them, I inner size of
an expert on this rank.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import accumulate, pairwise
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from megatron.bridge.models.conversion.param_mapping import AutoMapping
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor, nn
from torch.nn import Parameter

from backends.lora.linear import Segments
from backends.lora.parts import Part
from backends.training.megatron.fused import Fused
from backends.training.megatron.linear import Branches


class _Matrices(nn.Module):
    """One of each expert of this rank, under the names that the bridge knows: `weight0`, ..."""

    def __init__(self, config: TransformerConfig, num_experts: int, shape: tuple[int, int]) -> None:
        super().__init__()
        self.config = config
        self.num_experts = num_experts
        device = torch.cuda.current_device()
        for expert in range(num_experts):
            weight = torch.empty(shape, dtype=config.params_dtype, device=device)
            self.register_parameter(f"weight{expert}", Parameter(weight))

    def of(self, expert: int) -> Tensor:
        return self.get_parameter(f"weight{expert}")


class ColumnMatrices(_Matrices):
    """[2 I, H] each: gate and up."""


class RowMatrices(_Matrices):
    """[H, I] each."""


AutoMapping.register_module_type(ColumnMatrices.__name__, "column")
AutoMapping.register_module_type(RowMatrices.__name__, "row")


class _Expert(NamedTuple):
    modules: tuple[str, ...]
    up: Branches
    down: Branches


class Experts(nn.Module):
    """Takes the place of Megatron's own in a `MoELayer`, which sends tokens there and back."""

    def __init__(
        self, num_local_experts: int, config: TransformerConfig, *, pg_collection: Any, **_: Any
    ) -> None:
        super().__init__()
        assert config.moe_ffn_hidden_size is not None
        inner = config.moe_ffn_hidden_size // pg_collection.expt_tp.size()
        hidden = config.hidden_size
        self.linear_fc1 = ColumnMatrices(config, num_local_experts, (2 * inner, hidden))
        self.linear_fc2 = RowMatrices(config, num_local_experts, (hidden, inner))
        self._activation = config.activation_func
        self._segments = Segments()
        self._experts: list[_Expert] = []
        self._arrivals: Arrivals | None = None

    def adapt(self, experts: Sequence[Sequence[tuple[str, int]]], arrivals: Arrivals) -> None:
        """Put adapters into the experts of this rank, given by the names of gate, up and down and
        how many outputs of them are here. `arrivals` are of the same layer."""
        self._experts = [
            _Expert(
                tuple(name for name, _ in sizes),
                Branches(sizes[:2], self._segments),
                Branches(sizes[2:], self._segments),
            )
            for sizes in experts
        ]
        self._arrivals = arrivals

    def forward(
        self, rows: Tensor, rows_of_experts: Tensor, weights: Tensor
    ) -> tuple[Tensor, None]:
        """rows[N, H], expert after expert, and how they count [N] -> [N, H], this rank's summand
        of what the tensor-parallel ranks find; and no bias."""
        sizes = rows_of_experts.tolist()
        found = [
            self._one(number, of_expert, weight)
            for number, (of_expert, weight) in enumerate(
                zip(rows.split(sizes), weights.split(sizes), strict=True)
            )
        ]
        return torch.cat(found), None

    def _one(self, number: int, rows: Tensor, weights: Tensor) -> Tensor:
        """rows[n, H], weights[n] -> [n, H]"""
        assert self._arrivals is not None
        modules, up, down = self._experts[number]
        self._segments.current = tuple(self._arrivals.parts(number, modules))
        gate, value = up(rows, self.linear_fc1.of(number), None).chunk(2, dim=-1)
        inner = self._activation(gate) * value * weights[:, None]
        return down(inner.to(rows.dtype), self.linear_fc2.of(number), None)


class Arrivals:
    """Whose rows come to the experts of this rank."""

    def __init__(self, layer: MoELayer, segments: Segments) -> None:
        """`segments` are of the rows that go through the layer on this rank."""
        dispatcher: Any = layer.token_dispatcher
        self._group, self._tensor = dispatcher.tp_ep_group, dispatcher.tp_group
        self._local = slice(layer.local_expert_indices[0], layer.local_expert_indices[-1] + 1)
        self._segments = segments
        self._rows: list[list[list[int]]] = []
        layer.router.register_forward_hook(lambda _, __, out: self._note(out[1]))

    def parts(self, expert: int, modules: Sequence[str]) -> Iterator[Part]:
        """Of its rows, counted from its first; `modules` are those of the expert."""
        current = self._segments.current
        concerned = [any(part.changes(module) for module in modules) for part in current]
        if torch.is_grad_enabled():
            for part in current:
                _expect_pieces(part, modules)
        start = 0
        for rows in self._rows[expert]:
            bounds = list(pairwise(accumulate(rows, initial=start)))
            first = 0
            for part, changes in zip(current, concerned, strict=True):
                last = first + len(part.bounds)
                if changes:
                    yield from part.cut(bounds[first:last])
                first = last
            start = bounds[-1][1]

    def _note(self, routes: Tensor) -> None:
        """routes: bool[T, E], which experts each row goes to. Afterwards: by expert of this rank
        and by rank that sends, in the order of arrival, how many rows come of each adapter, and of
        none."""
        owners = self._owners(len(routes)).to(routes.device)
        size = (self._num_adapters + 1, routes.shape[1])
        counts = torch.zeros(size, dtype=torch.int64, device=routes.device)
        counts.index_add_(0, owners, routes.long())
        gathered = [torch.empty_like(counts) for _ in range(self._group.size())]
        dist.all_gather(gathered, counts, group=self._group)
        # The group has tensor-parallel ranks side by side; rows come from one of them after
        # another, of all the others.
        by_rank = torch.stack(gathered).unflatten(0, (-1, self._tensor.size())).transpose(0, 1)
        self._rows = by_rank.flatten(0, 1)[..., self._local].permute(2, 0, 1).tolist()

    @property
    def _num_adapters(self) -> int:
        return sum(len(part.bounds) for part in self._segments.current)

    def _owners(self, num_rows: int) -> Tensor:
        """int64[T]: the number of each row's adapter; K for those at the end that have none. A
        rank may have some of a sequence-parallel group's rows."""
        lengths = [end - start for part in self._segments.current for start, end in part.bounds]
        lengths.append(num_rows * self._tensor.size() - sum(lengths))
        owners = torch.arange(len(lengths)).repeat_interleave(torch.tensor(lengths))
        return owners[self._tensor.rank() * num_rows :][:num_rows]


def adapt_experts(layer: MoELayer, fused: Sequence[Fused], segments: Segments) -> None:
    """Put adapters into the experts of this rank, whose two layers follow each other in `fused`.
    `segments` are of the rows that go through the layer on this rank."""
    num_ranks = layer.token_dispatcher.tp_group.size()
    experts = [
        [
            *((target.name, target.out_features // num_ranks) for target in up.targets),
            *((target.name, target.out_features) for target in down.targets),
        ]
        for up, down in zip(fused[::2], fused[1::2], strict=True)
    ]
    layer.experts.adapt(experts, Arrivals(layer, segments))


def _expect_pieces(part: Part, modules: Sequence[str]) -> None:
    """Of several adapters only some may have rows, and a few at a time."""
    if part.gradient is not None and len(part.bounds) > 1:
        for module in modules:
            if part.changes(module):
                part.gradient.clear(module)
