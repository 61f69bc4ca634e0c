"""One pass of many requests through the base model, each with a gradient of its own."""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence

import torch
from torch import Tensor

from backends.batching.attention import packed_attention
from backends.batching.packing import SHARED_FORWARD_TOKENS, Microbatch, pack
from backends.lora.grouping import arranged
from backends.lora.head import target_logprobs
from backends.lora.parts import Owner, Part
from backends.memory import is_out_of_memory
from backends.model import FrozenModel
from backends.training.activations import Activations
from backends.training.lane import Lane
from backends.training.microbatch import Row, losses, total


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
        self._lanes = sorted(lanes, key=Lane.likeness)
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
        """What is trained says how much memory activations take."""
        self._activations.measure(lane.adapter for lane in self._lanes if lane.request.backward)

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
        data = [self._lanes[piece.request].request.data[piece.datum] for piece in microbatch.pieces]
        row = Row.of(data, self._model.device)
        with torch.set_grad_enabled(backward):
            hidden = self._hidden(row, parts, recompute)
            logprobs = target_logprobs(hidden, self._model.head_weight, row.targets, parts)
            computed = losses(self._lanes, microbatch.pieces, logprobs.split(row.lengths))
        loss = total(self._lanes, computed)
        self.backward(hidden, loss)
        if loss is None:
            return
        # All of them first: once a lane has taken what is its own, memory must not run out.
        gradients = [gradient for part in parts for gradient in part.take_gradients()]
        for (_, lane), gradient in zip(spans, gradients, strict=True):
            if gradient is not None and not lane.failed:
                lane.add_gradient(gradient)

    def backward(self, hidden: Tensor, loss: Tensor | None) -> None:
        """Of a microbatch with these last hidden states; there may be no loss."""
        if loss is not None:
            loss.backward()

    def _hidden(self, row: Row, parts: Sequence[Part], recompute: bool) -> Tensor:
        model = self._model
        return model.hidden(
            row.tokens,
            row.positions,
            parts,
            packed_attention(row.lengths, model.device, model.dtype),
            recompute=recompute,
        )
