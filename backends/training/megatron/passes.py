"""A pass over a divided model: which rank computes which datums, and how."""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence

from megatron.core import parallel_state
from torch import Tensor

from backends.batching.attention import AttentionPlan
from backends.batching.packing import SHARED_FORWARD_TOKENS, Microbatch, pack
from backends.lora.parts import Part
from backends.training.activations import Activations, Checkpointing
from backends.training.divided import DividedRanks
from backends.training.lane import Lane
from backends.training.megatron.model import MegatronModel
from backends.training.megatron.pipeline import Pipeline, Turn

_LEAST_TOKENS = {"cpu": 64, "cuda": 512}
"""A microbatch of fewer tokens, by type of device, takes about as long: its time goes to reading
weights."""


class MegatronPasses:
    """A `RunPass`. Ranks beyond one copy of the model take microbatches in turn."""

    def __init__(
        self,
        model: MegatronModel,
        ranks: DividedRanks,
        max_tokens_per_microbatch: int,
        checkpointing: Checkpointing,
    ) -> None:
        self._model = model
        self._ranks = ranks
        self._max_tokens = max_tokens_per_microbatch
        self._activations = Activations(_Stage(model), checkpointing)
        self._copy = parallel_state.get_data_parallel_rank()
        self._num_copies = parallel_state.get_data_parallel_world_size()
        # Those whose experts are on the same ranks lie side by side.
        num_mates = parallel_state.get_expert_model_parallel_world_size()
        first = self._copy // num_mates * num_mates
        self._mates = range(first, first + num_mates)
        self._num_stages = parallel_state.get_pipeline_model_parallel_world_size()

    def __call__(
        self, lanes: Sequence[Lane], make_room: Callable[[], bool]
    ) -> Generator[None, None, None]:
        """A rank whose memory runs out cannot go on, nor can the others without it. So `make_room`
        is asked beforehand, where little is left."""
        ordered = sorted(lanes, key=Lane.likeness)
        microbatches = self._pack(ordered)
        kinds = [[m for m in microbatches if m.backward == wanted] for wanted in (True, False)]
        for number, kind in enumerate(kind for kind in kinds if kind):
            if number:
                yield
            own = self._own(kind)
            recompute = kind[0].backward and self._must_recompute(kind, ordered)
            if recompute:
                make_room()
            Pipeline(self._model, ordered, recompute).run(own, backward=kind[0].backward)

    def _pack(self, lanes: Sequence[Lane]) -> list[Microbatch]:
        """Into as many as keep all stages of all copies of the model busy, if there are enough
        tokens."""
        lengths = [[len(datum.tokens) for datum in lane.request.data] for lane in lanes]
        backward = [lane.request.backward for lane in lanes]
        kind = self._model.device.type
        fair = -(-sum(map(sum, lengths)) // (self._num_copies * self._num_stages))
        limit = min(self._max_tokens, max(fair, _LEAST_TOKENS[kind]))
        return pack(lengths, backward, limit, SHARED_FORWARD_TOKENS[kind])

    def _own(self, microbatches: Sequence[Microbatch]) -> list[Turn]:
        """Those of this rank: as many as any other has, the last of which may be empty."""
        return [
            self._turn(microbatches[first : first + self._num_copies])
            for first in range(0, len(microbatches), self._num_copies)
        ]

    def _turn(self, at_once: Sequence[Microbatch]) -> Turn:
        """Of what all copies compute at a time, one microbatch each while there are any."""
        of_copies = dict(enumerate(at_once))
        nothing = Microbatch(())
        mates = [of_copies.get(copy, nothing) for copy in self._mates]
        return Turn.of(of_copies.get(self._copy, nothing), mates)

    def _must_recompute(self, microbatches: Sequence[Microbatch], lanes: Sequence[Lane]) -> bool:
        """The same on all ranks, which repeat the communication of a layer together."""
        num_kept = min(len(microbatches), self._num_stages)
        largest = max(microbatch.num_tokens for microbatch in microbatches)
        self._activations.measure(lane.adapter for lane in lanes if lane.request.backward)
        fit = self._activations.fit(num_kept * largest)
        return not all(self._ranks.exchange(fit))


class _Stage:
    """One stage of a model on its own, to be measured."""

    def __init__(self, model: MegatronModel) -> None:
        self._model = model
        self.device, self.dtype = model.device, model.dtype

    def hidden(
        self,
        tokens: Tensor,
        positions: Tensor,
        segments: Sequence[Part],
        plan: AttentionPlan,
        *,
        recompute: bool = False,
    ) -> Tensor:
        self._model.gpt.set_input_tensor(self._model.stage_input(len(tokens)))
        return self._model.hidden(tokens, positions, segments, plan, recompute=recompute)
