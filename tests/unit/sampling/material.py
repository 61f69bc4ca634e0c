"""Requests, engines, and the same answers from transformers and peft."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PreTrainedTokenizerBase

from backends.contract import Failure, SampleRequest, SampleResult
from backends.model import FrozenModel
from backends.sampling.embedded import EmbeddedEngine
from tests.tiny_models import VOCAB_SIZE
from tests.unit.backends.oracle import peft_model


@dataclass
class MakeEngine:
    model: FrozenModel
    tokenizer: PreTrainedTokenizerBase

    def __call__(self, **options: int) -> EmbeddedEngine:
        return EmbeddedEngine(self.model, self.tokenizer, **options)


def prompt(length: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, VOCAB_SIZE - 1, length)


def request(name: str, tokens: np.ndarray, **fields: Any) -> SampleRequest:
    fields = {"num_samples": 1, "max_tokens": 8, "temperature": 0.0} | fields
    return SampleRequest(request_id=name, prompt=tokens, **fields)


def outcomes(engine: EmbeddedEngine, *requests: SampleRequest) -> dict[str, SampleResult | Failure]:
    """Run the requests together, to the end."""
    for r in requests:
        engine.add(r)
    found = {}
    while engine.busy:
        found.update(engine.step())
    return found


def result(engine: EmbeddedEngine, one: SampleRequest) -> SampleResult:
    outcome = outcomes(engine, one)[one.request_id]
    assert isinstance(outcome, SampleResult), outcome
    return outcome


def reference(base: Path, adapter: str | None) -> nn.Module:
    """The model that transformers (and peft) make of the same folders."""
    if adapter is None:
        return AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    return peft_model(base, Path(adapter), dtype=torch.float32).eval()


@torch.no_grad()
def greedy(model: Any, tokens: np.ndarray, max_new: int) -> list[int]:
    out = model.generate(
        input_ids=torch.from_numpy(tokens)[None],
        attention_mask=torch.ones(1, len(tokens), dtype=torch.long),
        max_new_tokens=max_new,
        do_sample=False,
        eos_token_id=None,
        pad_token_id=0,
    )
    return out[0, len(tokens) :].tolist()


@torch.no_grad()
def logprobs(model: Any, tokens: np.ndarray) -> Tensor:
    """[T, V]: row i is the distribution after token i."""
    return model(input_ids=torch.from_numpy(tokens)[None]).logits[0].log_softmax(-1)
