"""One pass of many requests through the base model, each with a gradient of its own.

Shapes: T tokens of a packed row, N positions of a datum, K targets a position.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from backends.batching.attention import PackedAttention
from backends.batching.packing import Microbatch, Piece, pack
from backends.contract import Datum
from backends.lora.head import target_logprobs
from backends.lora.linear import Segment
from backends.losses.base import Inputs, Loss, LossRefusedError, Metrics
from backends.memory import is_out_of_memory
from backends.model import FrozenModel
from backends.training.lane import Lane


class _Computed(NamedTuple):
    """One datum after the forward, still attached to the graph."""

    piece: Piece
    logprobs: Tensor
    loss: Tensor
    metrics: Metrics


def run_pass(
    model: FrozenModel, lanes: Sequence[Lane], max_tokens: int
) -> Generator[None, None, None]:
    """Fill the lanes with outputs and gradients. Yields after every microbatch but the last;
    adapters must not change in between."""
    lengths = [[len(datum.tokens) for datum in lane.request.data] for lane in lanes]
    microbatches = pack(lengths, [lane.request.backward for lane in lanes], max_tokens)
    for number, microbatch in enumerate(microbatches):
        if number:
            yield
        _run(model, lanes, microbatch)


def _run(model: FrozenModel, lanes: Sequence[Lane], microbatch: Microbatch) -> None:
    """Run what is still wanted of a microbatch; in smaller ones if memory does not suffice."""
    microbatch = microbatch.without({i for i, lane in enumerate(lanes) if lane.failed})
    if not microbatch.pieces or _fits(model, lanes, microbatch):
        return
    parts = microbatch.split()
    if not parts:
        piece = microbatch.pieces[0]
        lanes[piece.request].fail(
            f"datum {piece.datum}: its {piece.num_tokens} tokens do not fit in memory", "server"
        )
    for part in parts:
        _run(model, lanes, part)


def _fits(model: FrozenModel, lanes: Sequence[Lane], microbatch: Microbatch) -> bool:
    """Compute a microbatch. False, and nothing has changed, if memory ran out."""
    try:
        _compute(model, lanes, microbatch)
    except RuntimeError as error:
        if not is_out_of_memory(error):
            raise
    else:
        return True
    # Only here, outside the handler, are the failed attempt's tensors free.
    if model.device.type == "cuda":
        torch.cuda.empty_cache()
    return False


def _compute(model: FrozenModel, lanes: Sequence[Lane], microbatch: Microbatch) -> None:
    with torch.set_grad_enabled(microbatch.backward):
        computed = _forward(model, lanes, microbatch)
    _record(lanes, computed)
    if not microbatch.backward:
        return
    good = [c for c in computed if not lanes[c.piece.request].failed]
    for request, gradient in _gradients(lanes, good).items():
        lanes[request].add_gradient(gradient)


def _forward(model: FrozenModel, lanes: Sequence[Lane], microbatch: Microbatch) -> list[_Computed]:
    data = [lanes[piece.request].request.data[piece.datum] for piece in microbatch.pieces]
    lengths = [piece.num_tokens for piece in microbatch.pieces]
    segments = [Segment(s.start, s.end, lanes[s.request].adapter) for s in microbatch.spans]
    tokens = np.concatenate([datum.tokens for datum in data], dtype=np.int64)
    positions = np.concatenate([np.arange(length) for length in lengths])
    hidden = model.hidden(
        torch.from_numpy(tokens).to(model.device),
        torch.from_numpy(positions).to(model.device),
        segments,
        PackedAttention(lengths),
    )
    targets = torch.from_numpy(_padded_targets(data)).to(model.device)
    logprobs = target_logprobs(hidden, model.head_weight, targets, segments)
    computed = (
        _loss(lanes[piece.request], piece, datum, rows)
        for piece, datum, rows in zip(microbatch.pieces, data, logprobs.split(lengths), strict=True)
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
    targets = datum.loss_inputs["target_tokens"]
    logprobs = rows[:, 0] if targets.ndim == 1 else rows[:, : targets.shape[1]]
    inputs = _inputs(lane.loss, datum, rows.device)
    try:
        loss, metrics = lane.loss.compute(logprobs, inputs, lane.request.loss_config)
    except LossRefusedError as error:
        lane.fail(f"datum {piece.datum}: {error}", "user")
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


def _gradients(
    lanes: Sequence[Lane], computed: Sequence[_Computed]
) -> dict[int, tuple[Tensor, ...]]:
    """By request, in the order of its adapter's tensors. `autograd.grad` rather than `backward`,
    so that nothing is left half added when memory runs out on the way."""
    if not computed:
        return {}
    requests = list(dict.fromkeys(c.piece.request for c in computed))
    leaves = {r: [tensor for _, tensor in lanes[r].adapter.named_tensors()] for r in requests}
    total = torch.cat([c.loss.reshape(-1) for c in computed]).sum()
    flat = iter(torch.autograd.grad(total, [leaf for r in requests for leaf in leaves[r]]))
    return {r: tuple(next(flat) for _ in leaves[r]) for r in requests}
