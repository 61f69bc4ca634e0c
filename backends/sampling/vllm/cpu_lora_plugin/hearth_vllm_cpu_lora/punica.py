"""LoRA products by groups of rows that share an adapter.

Shapes: T rows, S adapter slots, R rank, V vocabulary. vLLM keeps the matrices of all slots stacked:
A [S, 1, R, in], B [S, 1, out, R]; an index of -1 means "no adapter".
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from vllm.lora.punica_wrapper.punica_cpu import PunicaWrapperCPU

Rows = slice | Tensor
Groups = list[tuple[int, Rows]]


def groups_of(slots: Tensor) -> Groups:
    """The rows of each slot that occurs in slots[T]; rows of -1 are in no group."""
    runs: dict[int, list[tuple[int, int]]] = {}
    start = 0
    for slot, length in zip(*(t.tolist() for t in _runs(slots)), strict=True):
        if slot >= 0:
            runs.setdefault(slot, []).append((start, start + length))
        start += length
    return [(slot, _rows(spans)) for slot, spans in runs.items()]


def _runs(slots: Tensor) -> tuple[Tensor, Tensor]:
    return torch.unique_consecutive(slots, return_counts=True)


def _rows(spans: list[tuple[int, int]]) -> Rows:
    if len(spans) == 1:
        return slice(*spans[0])
    return torch.cat([torch.arange(*span) for span in spans])


def add_product(y: Tensor, x: Tensor, a: Tensor, b: Tensor, scale: float, groups: Groups) -> None:
    """y[rows] += scale * (x[rows] @ A^T) @ B^T, for y[T, out], x[T, in] and each group."""
    for slot, rows in groups:
        low = x[rows] @ a[slot, 0].t()
        y[rows] += (scale * low @ b[slot, 0, : y.shape[-1]].t()).to(y.dtype)


class GroupedPunicaCPU(PunicaWrapperCPU):
    """Stock metadata, own arithmetic."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._token_groups: Groups = []
        self._sampler_groups: Groups = []
        self.step_rows: Tensor | None = None
        """While prompts are scored: the step's hidden states [T, hidden], of which the rows given
        to `add_lora_logits` are a slice."""

    def update_metadata(self, *args: Any, **kwargs: Any) -> None:
        super().update_metadata(*args, **kwargs)
        self._token_groups = groups_of(self.token_lora_indices)
        self._sampler_groups = groups_of(self.sampler_indices)

    def add_lora_linear(
        self,
        y: Tensor,
        x: Tensor,
        lora_a_stacked: tuple[Tensor, ...],
        lora_b_stacked: tuple[Tensor, ...],
        scale: float,
        output_slices: tuple[int, ...],
        **_: Any,
    ) -> None:
        flat_y, flat_x = y.view(-1, y.shape[-1]), x.view(-1, x.shape[-1])
        start = 0
        for a, b, width in zip(lora_a_stacked, lora_b_stacked, output_slices, strict=True):
            part = flat_y[:, start : start + width]
            add_product(part, flat_x, a, b, scale, self._token_groups)
            start += width

    def add_lora_embedding(
        self, y: Tensor, x: Tensor, lora_b_stacked: Tensor, add_inputs: bool = True, **_: Any
    ) -> None:
        flat_y, flat_x = y.view(-1, y.shape[-1]), x.view(-1, x.shape[-1])
        for slot, rows in self._token_groups:
            delta = (flat_x[rows] @ lora_b_stacked[slot, 0].t()).to(y.dtype)
            flat_y[rows] = flat_y[rows] + delta if add_inputs else delta

    def add_lora_logits(
        self,
        y: Tensor,
        x: Tensor,
        lora_a_stacked: Tensor,
        lora_b_stacked: Tensor,
        scale: float,
        **_: Any,
    ) -> None:
        """x[M, hidden], y[M, V]: the rows to sample from, or some rows of a prompt."""
        groups = self._sampler_groups
        if self.step_rows is not None:
            first = (x.storage_offset() - self.step_rows.storage_offset()) // x.shape[-1]
            groups = groups_of(self.token_lora_indices[first : first + len(x)])
        add_product(y, x, lora_a_stacked, lora_b_stacked, scale, groups)
