"""What goes into the model for a microbatch, and what is made of what comes out.

Shapes: T tokens of a packed row, N positions of a datum, K targets a position.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from backends.batching.packing import Piece
from backends.contract import Datum
from backends.losses.base import Inputs, Loss, LossRefusedError, Metrics
from backends.training.lane import Lane


class Row(NamedTuple):
    """Datums end to end."""

    lengths: list[int]
    tokens: Tensor
    """int64[T]"""
    positions: Tensor
    """int64[T], of each token in its datum."""
    targets: Tensor
    """int64[T, K] for the largest K; what is padded is computed and looked at by nobody."""

    @classmethod
    def of(cls, data: Sequence[Datum], device: torch.device) -> Row:
        lengths = [len(datum.tokens) for datum in data]
        tokens = np.concatenate([datum.tokens for datum in data], dtype=np.int64)
        positions = np.concatenate([np.arange(length) for length in lengths])
        arrays = (tokens, positions, _padded_targets(data))
        return cls(lengths, *(torch.from_numpy(array).to(device) for array in arrays))


class Computed(NamedTuple):
    """One datum after the forward, still attached to the graph."""

    piece: Piece
    logprobs: Tensor
    loss: Tensor
    metrics: Metrics


def losses(
    lanes: Sequence[Lane], pieces: Sequence[Piece], logprobs: Sequence[Tensor]
) -> list[Computed]:
    """Of each datum, from its rows [N, K of the microbatch] of target log-probabilities, without
    those of requests that have failed. The lanes have their numbers afterwards."""
    found = (
        _loss(lanes[piece.request], piece, rows)
        for piece, rows in zip(pieces, logprobs, strict=True)
    )
    computed = [one for one in found if one is not None]
    _record(lanes, computed)
    return computed


def total(lanes: Sequence[Lane], computed: Sequence[Computed]) -> Tensor | None:
    """The sum of what has a gradient, None if nothing has: that of a failed request has not."""
    wanted = [c.loss for c in computed if c.piece.backward and not lanes[c.piece.request].failed]
    return torch.cat([loss.reshape(-1) for loss in wanted]).sum() if wanted else None


def _padded_targets(data: Sequence[Datum]) -> np.ndarray:
    targets = [datum.loss_inputs["target_tokens"].reshape(len(datum.tokens), -1) for datum in data]
    padded = np.zeros((sum(map(len, targets)), max(t.shape[1] for t in targets)), np.int64)
    start = 0
    for rows in targets:
        padded[start : start + len(rows), : rows.shape[1]] = rows
        start += len(rows)
    return padded


def _loss(lane: Lane, piece: Piece, rows: Tensor) -> Computed | None:
    if lane.failed:
        return None
    datum = lane.request.data[piece.datum]
    rows = rows if piece.backward else rows.detach()
    targets = datum.loss_inputs["target_tokens"]
    logprobs = rows[:, 0] if targets.ndim == 1 else rows[:, : targets.shape[1]]
    inputs = _inputs(lane.loss, datum, rows.device)
    try:
        loss, metrics = lane.loss.compute(logprobs, inputs, lane.request.loss_config)
    except LossRefusedError as error:
        lane.fail_datum(piece.datum, str(error), "user")
        return None
    return Computed(piece, logprobs, loss, metrics)


def _inputs(loss: Loss, datum: Datum, device: torch.device) -> Inputs:
    if loss.raw_inputs:
        return {name: torch.from_numpy(v.copy()) for name, v in datum.loss_inputs.items()}
    return {
        name: torch.from_numpy(np.array(values, dtype=np.float32)).to(device)
        for name, values in datum.loss_inputs.items()
        if name != "target_tokens"
    }


def _record(lanes: Sequence[Lane], computed: Sequence[Computed]) -> None:
    """Hand each lane its datums' numbers, brought from the device in three copies."""
    if not computed:
        return
    logprobs = _to_numpy([c.logprobs for c in computed])
    values = _to_numpy([c.loss for c in computed])
    scalars = [value.detach().to(torch.float64) for c in computed for value in c.metrics.values()]
    numbers = iter(torch.stack(scalars).tolist() if scalars else [])
    for c, lp, loss in zip(computed, logprobs, values, strict=True):
        metrics = {name: next(numbers) for name in c.metrics}
        lanes[c.piece.request].record(c.piece.datum, lp, loss, metrics)


def _to_numpy(tensors: Sequence[Tensor]) -> list[np.ndarray]:
    """float32 arrays of the same shapes, each with memory of its own."""
    flat = torch.cat([tensor.detach().reshape(-1) for tensor in tensors]).cpu().numpy()
    ends = np.cumsum([tensor.numel() for tensor in tensors])[:-1]
    parts = zip(np.split(flat, ends), tensors, strict=True)
    return [part.reshape(tuple(tensor.shape)).copy() for part, tensor in parts]
