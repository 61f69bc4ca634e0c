"""Microbatches through the stages of a model, by Megatron's own schedule.

Shapes: T tokens of a packed row, E hidden size.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from megatron.core.models.gpt import GPTModel
from megatron.core.pipeline_parallel import get_forward_backward_func
from torch import Tensor

from backends.batching.attention import packed_attention
from backends.batching.packing import Microbatch
from backends.contract import Datum
from backends.lora.adapter import UNEMBED
from backends.lora.grouping import arranged
from backends.lora.head import target_logprobs
from backends.lora.parts import Owner, Part
from backends.training.lane import Lane
from backends.training.megatron.model import MegatronModel
from backends.training.megatron.vocabulary import DividedVocabulary
from backends.training.microbatch import Row, losses, total


class Turn(NamedTuple):
    """What a rank computes at a time."""

    microbatch: Microbatch
    requests: list[int]
    """All whose tokens may come to the experts of this rank, in order: those of the microbatch,
    and of what the ranks that share experts with this one compute at the same time."""

    @classmethod
    def of(cls, own: Microbatch, mates: Sequence[Microbatch]) -> Turn:
        """`mates` are the microbatches of all that share experts, this rank's own too."""
        return cls(own, sorted({piece.request for mate in mates for piece in mate.pieces}))


@dataclass(slots=True)
class _Forward:
    """A microbatch that has gone forward here, and waits for its backward or for the end of it."""

    microbatch: Microbatch
    lanes: list[Lane]
    """Of the adapters in `parts`, in their order."""
    parts: list[Part]
    begun: bool = False
    """Whether its backward has begun here. It has ended when something else goes on."""


class Pipeline:
    """Fills lanes with the outputs and gradients of their datums, on this rank.

    Losses are computed on the last stage, and by all of its tensor-parallel ranks alike. A
    request that fails there adds no loss from then on; other stages learn of it after the pass."""

    def __init__(self, model: MegatronModel, lanes: Sequence[Lane], recompute: bool) -> None:
        self._model = model
        self._lanes = lanes
        self._recompute = recompute
        self._waiting: deque[_Forward] = deque()

    def run(self, turns: Sequence[Turn], *, backward: bool) -> None:
        """At least one, as many on every rank. A microbatch without a datum keeps its ranks in
        step with others."""
        with torch.set_grad_enabled(backward):
            get_forward_backward_func()(
                forward_step_func=self._step,
                data_iterator=iter(turns),
                model=self._model.gpt,
                num_microbatches=len(turns),
                # Sizes that do not matter where they vary.
                seq_length=1,
                micro_batch_size=1,
                forward_only=not backward,
            )
        self._collect()
        self._waiting.clear()

    def _step(self, turns: Iterator[Turn], gpt: GPTModel) -> tuple[Tensor, Any]:
        """As Megatron wants it: what this stage gives, and what makes a loss of it."""
        self._collect()
        model, forward = self._model, self._begin(next(turns))
        row = self._row(forward.microbatch)
        out = model.hidden(
            row.tokens,
            row.positions,
            forward.parts,
            packed_attention(row.lengths, model.device, model.dtype),
            recompute=self._recompute,
        )
        if out.requires_grad:
            out.register_hook(lambda grad: setattr(forward, "begun", True))
            self._waiting.append(forward)
        return out, lambda hidden: self._loss(forward, row, hidden)

    def _begin(self, turn: Turn) -> _Forward:
        rows = {span.request: (span.start, span.end) for span in turn.microbatch.spans}
        lanes = [self._lanes[request] for request in turn.requests]
        owners: list[Owner] = []
        for request, lane in zip(turn.requests, lanes, strict=True):
            here = owners[-1].end if owners else 0
            start, end = rows.get(request, (here, here))
            owners.append(Owner(start, end, lane.adapter, lane.request.backward))
        return _Forward(turn.microbatch, lanes, arranged(owners, self._model.dtype))

    def _row(self, microbatch: Microbatch) -> Row:
        """Filled up by tokens that nobody looks at."""
        data = [self._lanes[piece.request].request.data[piece.datum] for piece in microbatch.pieces]
        multiple = self._model.token_multiple
        missing = -microbatch.num_tokens % multiple or (0 if data else multiple)
        zeros = np.zeros(missing, np.int64)
        filler = [Datum(tokens=zeros, loss_inputs={"target_tokens": zeros})] if missing else []
        return Row.of([*data, *filler], self._model.device)

    def _loss(self, forward: _Forward, row: Row, hidden: Tensor) -> tuple[Tensor, Tensor, None]:
        """Of hidden[T, E]: the sum of all losses, a number of tokens to divide by, which there is
        not, and nothing to report. Never apart from the graph: stages before this one wait for a
        gradient."""
        model, pieces = self._model, forward.microbatch.pieces
        logprobs = target_logprobs(
            hidden,
            model.head_weight,
            row.targets,
            forward.parts,
            vocabulary=DividedVocabulary(model.shares[UNEMBED].outputs[0], model.tensor_group),
        )
        rows = logprobs.split(row.lengths)[: len(pieces)]
        loss = total(self._lanes, losses(self._lanes, pieces, rows))
        if loss is None:
            loss = logprobs[:0].sum()
        return loss, torch.zeros((), dtype=torch.int), None

    def _collect(self) -> None:
        """Hand over the gradients of microbatches whose backward has ended."""
        while self._waiting and self._waiting[0].begun:
            forward = self._waiting.popleft()
            gradients = (gradient for part in forward.parts for gradient in part.take_gradients())
            for lane, gradient in zip(forward.lanes, gradients, strict=True):
                if gradient is not None and not lane.failed:
                    lane.add_gradient(gradient)
