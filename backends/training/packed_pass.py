"""One pass of many requests through the base model, each with a gradient of its own.

Shapes: T tokens of a packed row, N positions of a datum, K targets a position.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from backends.batching.attention import packed_attention
from backends.batching.packing import SHARED_FORWARD_TOKENS, Microbatch, Piece, pack
from backends.contract import Datum
from backends.lora.grouping import arranged, likeness
from backends.lora.head import target_logprobs
from backends.lora.parts import Owner, Part
from backends.losses.base import Inputs, Loss, LossRefusedError, Metrics
from backends.memory import is_out_of_memory
from backends.model import FrozenModel
from backends.training.activations import Activations
from backends.training.lane import Lane


class _Computed(NamedTuple):
    """One datum after the forward, still attached to the graph."""

    piece: Piece
    logprobs: Tensor
    loss: Tensor
    metrics: Metrics


class PackedPass:
    """Fills lanes with outputs and gradients."""

    def __init__(
        self,
        model: FrozenModel,
        lanes: Sequence[Lane],
        activations: Activations,
        make_room: Callable[[], bool],
    ) -> None:
        """`make_room` is asked when memory ran out; it says whether there is more now."""
        self._model = model
        self._lanes = sorted(
            lanes, key=lambda lane: likeness(lane.adapter, lane.request.num_tokens)
        )
        self._activations = activations
        self._make_room = make_room

    def run(self, max_tokens: int) -> Generator[None, None, None]:
        """Yields after every microbatch but the last; adapters must not change in between."""
        lengths = [[len(datum.tokens) for datum in lane.request.data] for lane in self._lanes]
        backward = [lane.request.backward for lane in self._lanes]
        shared = SHARED_FORWARD_TOKENS[self._model.device.type]
        for number, microbatch in enumerate(pack(lengths, backward, max_tokens, shared)):
            if number:
                yield
            self._run(microbatch)

    def _run(self, microbatch: Microbatch) -> None:
        """Run what is still wanted of a microbatch. If memory does not suffice, keep less of it
        for the backward, then make room, then cut it into smaller ones."""
        microbatch = microbatch.without({i for i, lane in enumerate(self._lanes) if lane.failed})
        if not microbatch.pieces:
            return
        for recompute in self._activations.tries(microbatch, self._lanes):
            if self._fits(microbatch, recompute):
                return
        parts = [microbatch] if self._make_room() else microbatch.split()
        if not parts:
            piece = microbatch.pieces[0]
            reason = f"its {piece.num_tokens} tokens do not fit in memory"
            self._lanes[piece.request].fail_datum(piece.datum, reason, "server")
        for part in parts:
            self._run(part)

    def _fits(self, microbatch: Microbatch, recompute: bool) -> bool:
        """Compute a microbatch. False, and nothing has changed, if memory ran out."""
        try:
            self._compute(microbatch, recompute)
        except RuntimeError as error:
            if not is_out_of_memory(error):
                raise
        else:
            return True
        # Only here, outside the handler, are the failed attempt's tensors free.
        if self._model.device.type == "cuda":
            torch.cuda.empty_cache()
        return False

    def _compute(self, microbatch: Microbatch, recompute: bool) -> None:
        spans = [(span, self._lanes[span.request]) for span in microbatch.spans]
        owners = [Owner(s.start, s.end, lane.adapter, lane.request.backward) for s, lane in spans]
        parts = arranged(owners, self._model.dtype)
        with torch.set_grad_enabled(microbatch.backward):
            computed = self._forward(microbatch, parts, recompute)
        _record(self._lanes, computed)
        good = [c for c in computed if c.piece.backward and not self._lanes[c.piece.request].failed]
        if not good:
            return
        torch.cat([c.loss.reshape(-1) for c in good]).sum().backward()
        # All of them first: once a lane has taken what is its own, memory must not run out.
        gradients = [gradient for part in parts for gradient in part.take_gradients()]
        for (_, lane), gradient in zip(spans, gradients, strict=True):
            if gradient is not None and not lane.failed:
                lane.add_gradient(gradient)

    def _forward(
        self, microbatch: Microbatch, parts: Sequence[Part], recompute: bool
    ) -> list[_Computed]:
        pieces, model = microbatch.pieces, self._model
        data = [self._lanes[piece.request].request.data[piece.datum] for piece in pieces]
        lengths = [piece.num_tokens for piece in pieces]
        tokens = np.concatenate([datum.tokens for datum in data], dtype=np.int64)
        positions = np.concatenate([np.arange(length) for length in lengths])
        hidden = model.hidden(
            torch.from_numpy(tokens).to(model.device),
            torch.from_numpy(positions).to(model.device),
            parts,
            packed_attention(lengths, model.device, model.dtype),
            recompute=recompute,
        )
        targets = torch.from_numpy(_padded_targets(data)).to(model.device)
        logprobs = target_logprobs(hidden, model.head_weight, targets, parts)
        computed = (
            _loss(self._lanes[piece.request], piece, datum, rows)
            for piece, datum, rows in zip(pieces, data, logprobs.split(lengths), strict=True)
        )
        return [one for one in computed if one is not None]


def _padded_targets(data: Sequence[Datum]) -> np.ndarray:
    """int64[T, K] for the largest K; what is padded is computed and looked at by nobody."""
    targets = [datum.loss_inputs["target_tokens"].reshape(len(datum.tokens), -1) for datum in data]
    padded = np.zeros((sum(map(len, targets)), max(t.shape[1] for t in targets)), np.int64)
    start = 0
    for rows in targets:
        padded[start : start + len(rows), : rows.shape[1]] = rows
        start += len(rows)
    return padded


def _loss(lane: Lane, piece: Piece, datum: Datum, rows: Tensor) -> _Computed | None:
    """The datum's loss from its rows [N, K of the microbatch] of target log-probabilities; None
    once its request has failed."""
    if lane.failed:
        return None
    rows = rows if piece.backward else rows.detach()
    targets = datum.loss_inputs["target_tokens"]
    logprobs = rows[:, 0] if targets.ndim == 1 else rows[:, : targets.shape[1]]
    inputs = _inputs(lane.loss, datum, rows.device)
    try:
        loss, metrics = lane.loss.compute(logprobs, inputs, lane.request.loss_config)
    except LossRefusedError as error:
        lane.fail_datum(piece.datum, str(error), "user")
        return None
    return _Computed(piece, logprobs, loss, metrics)


def _inputs(loss: Loss, datum: Datum, device: torch.device) -> Inputs:
    if loss.raw_inputs:
        return {name: torch.from_numpy(v.copy()) for name, v in datum.loss_inputs.items()}
    return {
        name: torch.from_numpy(np.array(values, dtype=np.float32)).to(device)
        for name, values in datum.loss_inputs.items()
        if name != "target_tokens"
    }


def _record(lanes: Sequence[Lane], computed: Sequence[_Computed]) -> None:
    """Hand each lane its datums' numbers, brought from the device in three copies."""
    if not computed:
        return
    logprobs = _to_numpy([c.logprobs for c in computed])
    losses = _to_numpy([c.loss for c in computed])
    scalars = [value.detach().to(torch.float64) for c in computed for value in c.metrics.values()]
    values = iter(torch.stack(scalars).tolist() if scalars else [])
    for c, lp, loss in zip(computed, logprobs, losses, strict=True):
        metrics = {name: next(values) for name in c.metrics}
        lanes[c.piece.request].record(c.piece.datum, lp, loss, metrics)


def _to_numpy(tensors: Sequence[Tensor]) -> list[np.ndarray]:
    """float32 arrays of the same shapes, each with memory of its own."""
    flat = torch.cat([tensor.detach().reshape(-1) for tensor in tensors]).cpu().numpy()
    ends = np.cumsum([tensor.numel() for tensor in tensors])[:-1]
    parts = zip(np.split(flat, ends), tensors, strict=True)
    return [part.reshape(tuple(tensor.shape)).copy() for part, tensor in parts]
