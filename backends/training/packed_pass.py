"""One pass of many requests through the base model, each with a gradient of its own."""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence

import torch

from backends.batching.attention import packed_attention
from backends.batching.packing import SHARED_FORWARD_TOKENS, Microbatch, pack
from backends.lora.grouping import arranged
from backends.lora.head import target_logprobs
from backends.lora.parts import Owner, Part
from backends.memory import is_out_of_memory
from backends.model import FrozenModel
from backends.training.activations import Activations
from backends.training.lane import Lane
from backends.training.microbatch import Computed, Row, losses, total


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
        loss = total(self._lanes, computed)
        if loss is None:
            return
        loss.backward()
        # All of them first: once a lane has taken what is its own, memory must not run out.
        gradients = [gradient for part in parts for gradient in part.take_gradients()]
        for (_, lane), gradient in zip(spans, gradients, strict=True):
            if gradient is not None and not lane.failed:
                lane.add_gradient(gradient)

    def _forward(
        self, microbatch: Microbatch, parts: Sequence[Part], recompute: bool
    ) -> list[Computed]:
        pieces, model = microbatch.pieces, self._model
        data = [self._lanes[piece.request].request.data[piece.datum] for piece in pieces]
        row = Row.of(data, model.device)
        hidden = model.hidden(
            row.tokens,
            row.positions,
            parts,
            packed_attention(row.lengths, model.device, model.dtype),
            recompute=recompute,
        )
        logprobs = target_logprobs(hidden, model.head_weight, row.targets, parts)
        return losses(self._lanes, pieces, logprobs.split(row.lengths))
