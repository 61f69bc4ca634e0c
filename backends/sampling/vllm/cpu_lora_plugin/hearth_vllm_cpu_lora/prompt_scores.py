"""Scores of the prompt in vLLM's V1 model runner: the right LoRA rows for them, and scores of
chosen tokens (`SamplingParams.prompt_logprob_token_ids`), as the GPU model runner gives them.

Shapes: T rows of a step, P prompt tokens, K chosen tokens a row.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import wraps
from typing import Any

import torch
from torch import Tensor
from vllm.exceptions import VLLMValidationError
from vllm.v1.engine.input_processor import InputProcessor
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.worker.gpu_model_runner import GPUModelRunner

_INSTALLED = "_hearth_prompt_scores"


def install() -> None:
    if hasattr(GPUModelRunner, _INSTALLED):
        return
    setattr(GPUModelRunner, _INSTALLED, True)
    runner, processor = GPUModelRunner, InputProcessor
    runner._get_prompt_logprobs_dict = _scoring(runner._get_prompt_logprobs_dict)
    runner.sample_tokens = _handing_over(runner.sample_tokens)
    processor._validate_params = _accepting(processor._validate_params)


def _accepting(validate: Callable[..., Any]) -> Callable[..., Any]:
    """Let through what `validate` refuses only because the V1 runner of vLLM cannot do it. By
    then it has checked the chosen tokens, and made an array of them."""

    @wraps(validate)
    def accepting(self: InputProcessor, params: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            return validate(self, params, *args, **kwargs)
        except VLLMValidationError as error:
            if "requires the V2 model runner" not in str(error):
                raise
        rest = copy.copy(params)
        rest.prompt_logprob_token_ids = rest.prompt_logprob_start = None
        return validate(self, rest, *args, **kwargs)

    return accepting


def _scoring(compute: Callable[..., Any]) -> Callable[..., Any]:
    """Tell the LoRA layers which rows are scored, and score the chosen tokens too."""

    @wraps(compute)
    def scoring(self: Any, hidden: Tensor, num_scheduled: dict[str, int]) -> Any:
        wrappers = _punica_wrappers(self)
        for wrapper in wrappers:
            wrapper.step_rows = hidden
        try:
            self._hearth_scores = ChosenTokens.of(self).step(self, hidden, num_scheduled)
            return compute(self, hidden, num_scheduled)
        finally:
            for wrapper in wrappers:
                wrapper.step_rows = None

    return scoring


def _handing_over(sample: Callable[..., Any]) -> Callable[..., Any]:
    """Put the scores into the step's output. CPU runners answer at once, never later."""

    @wraps(sample)
    def handing_over(self: Any, *args: Any, **kwargs: Any) -> Any:
        self._hearth_scores = {}
        output = sample(self, *args, **kwargs)
        if self._hearth_scores:
            assert isinstance(output, ModelRunnerOutput)
            output.prompt_token_id_logprobs_dict = self._hearth_scores
        return output

    return handing_over


def _punica_wrappers(runner: Any) -> list[Any]:
    manager = getattr(runner, "lora_manager", None)
    return [] if manager is None else [*manager._adapter_manager.punica_wrapper_mapping.values()]


class ChosenTokens:
    """The scores of prompts that are being read, in chunks; given out with the last chunk."""

    def __init__(self) -> None:
        self._scores: dict[str, Tensor] = {}
        """By request, float32[rows, K] on the way."""
        self._done: set[str] = set()
        """A request that is read again, after preemption, was answered already."""

    @classmethod
    def of(cls, runner: Any) -> ChosenTokens:
        if not hasattr(runner, "_hearth_chosen"):
            runner._hearth_chosen = cls()
        return runner._hearth_chosen

    def step(self, runner: Any, hidden: Tensor, num_scheduled: dict[str, int]) -> dict[str, Tensor]:
        """Score this step's rows hidden[T, size]; gives the requests whose prompt is read."""
        self._scores = {name: s for name, s in self._scores.items() if name in runner.requests}
        self._done &= runner.requests.keys()
        finished = {}
        for name, count in num_scheduled.items():
            request = runner.requests[name]
            params = request.sampling_params
            if params is None or params.prompt_logprob_token_ids is None or name in self._done:
                continue
            index = runner.input_batch.req_id_to_index[name]
            first_row = runner.query_start_loc.np[index].item()
            done = self._add(runner, name, request, hidden[first_row : first_row + count])
            if done:
                self._done.add(name)
                finished[name] = self._scores.pop(name)
        return finished

    def _add(self, runner: Any, name: str, request: Any, hidden: Tensor) -> bool:
        """Score the rows of one request; whether its prompt is read now."""
        chosen = torch.tensor(request.sampling_params.prompt_logprob_token_ids, dtype=torch.int64)
        start = request.sampling_params.prompt_logprob_start or 0
        scores = self._scores.setdefault(name, torch.zeros(chosen.shape))
        position = request.num_computed_tokens
        end = position + len(hidden)
        # The last prompt row predicts the first new token.
        first, last = max(start, position), min(end, len(request.prompt_token_ids) - 1)
        if first < last:
            logits = runner.model.compute_logits(hidden[first - position : last - position])
            tokens = chosen[first - start : last - start]
            logprobs = logits.float().log_softmax(-1).gather(1, tokens.clamp(min=0))
            scores[first - start : last - start] = logprobs.masked_fill(tokens < 0, -torch.inf)
        return end >= len(request.prompt_token_ids)
