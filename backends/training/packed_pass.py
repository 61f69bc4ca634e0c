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
        self.measure()
        shared = SHARED_FORWARD_TOKENS[self._model.device.type]
        for number, microbatch in enumerate(pack(*self.shape(), max_tokens, shared)):
            if number:
                yield
            self._run(microbatch)

    def measure(self) -> None:
        """What the first lane that trains says of the memory that activations take."""
        trained = next((lane.adapter for lane in self._lanes if lane.request.backward), None)
        if trained is not None:
            self._activations.measure(trained)

    def shape(self) -> tuple[list[list[int]], list[bool]]:
        """Of each lane: the lengths of its datums in tokens, and whether it wants gradients."""
        lengths = [[len(datum.tokens) for datum in lane.request.data] for lane in self._lanes]
        return lengths, [lane.request.backward for lane in self._lanes]

    def wanted(self, microbatch: Microbatch) -> Microbatch:
        """Without what belongs to requests that have failed."""
        return microbatch.without({i for i, lane in enumerate(self._lanes) if lane.failed})

    def _run(self, microbatch: Microbatch) -> None:
        """Run what is still wanted of a microbatch. If memory does not suffice, keep less of it
        for the backward, then make room, then cut it into smaller ones."""
        microbatch = self.wanted(microbatch)
        if not microbatch.pieces:
            return
        for recompute in self._activations.tries(microbatch):
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
            self.compute(microbatch, recompute, microbatch.backward)
        except RuntimeError as error:
            if not is_out_of_memory(error):
                raise
        else:
            return True
        # Only here, outside the handler, are the failed attempt's tensors free.
        if self._model.device.type == "cuda":
            torch.cuda.empty_cache()
        return False

    def compute(self, microbatch: Microbatch, recompute: bool, backward: bool) -> None:
        """Forward, and the backward of what wants one."""
        spans = [(span, self._lanes[span.request]) for span in microbatch.spans]
        owners = [Owner(s.start, s.end, lane.adapter, lane.request.backward) for s, lane in spans]
        parts = arranged(owners, self._model.dtype)
        with torch.set_grad_enabled(backward):
            hidden = self._hidden(microbatch, parts, recompute)
            computed = self._losses(microbatch, hidden, parts)
        _record(self._lanes, computed)
        good = [c for c in computed if c.piece.backward and not self._lanes[c.piece.request].failed]
        self.backward(hidden, [c.loss for c in good])
        if not good:
            return
        # All of them first: once a lane has taken what is its own, memory must not run out.
        gradients = [gradient for part in parts for gradient in part.take_gradients()]
        for (_, lane), gradient in zip(spans, gradients, strict=True):
            if gradient is not None and not lane.failed:
                lane.add_gradient(gradient)

    def backward(self, hidden: Tensor, losses: Sequence[Tensor]) -> None:
        """Of a microbatch with these last hidden states; there may be no losses."""
        if losses:
            torch.cat([loss.reshape(-1) for loss in losses]).sum().backward()

    def _data(self, microbatch: Microbatch) -> list[Datum]:
        return [self._lanes[one.request].request.data[one.datum] for one in microbatch.pieces]

    def _hidden(self, microbatch: Microbatch, parts: Sequence[Part], recompute: bool) -> Tensor:
        model = self._model
        lengths = [piece.num_tokens for piece in microbatch.pieces]
        tokens = [datum.tokens for datum in self._data(microbatch)]
        positions = np.concatenate([np.arange(length) for length in lengths])
        return model.hidden(
            torch.from_numpy(np.concatenate(tokens, dtype=np.int64)).to(model.device),
            torch.from_numpy(positions).to(model.device),
            parts,
            packed_attention(lengths, model.device, model.dtype),
            recompute=recompute,
        )

    def _losses(
        self, microbatch: Microbatch, hidden: Tensor, parts: Sequence[Part]
    ) -> list[_Computed]:
        data, model = self._data(microbatch), self._model
        targets = torch.from_numpy(_padded_targets(data)).to(model.device)
        logprobs = target_logprobs(hidden, model.head_weight, targets, parts)
        rows = logprobs.split([len(datum.tokens) for datum in data])
        computed = (
            _loss(self._lanes[piece.request], piece, datum, of_datum)
            for piece, datum, of_datum in zip(microbatch.pieces, data, rows, strict=True)
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
