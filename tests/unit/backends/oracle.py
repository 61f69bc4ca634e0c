"""The other side of every comparison: transformers + peft in float64, nothing of Hearth's."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from peft import PeftModel
from torch import Tensor
from transformers import AutoModelForCausalLM


@contextmanager
def peft_warnings_expected() -> Iterator[None]:
    with warnings.catch_warnings():
        # peft 0.21 reads an attribute that transformers 5.24 deprecates.
        warnings.filterwarnings("ignore", message="`is_gradient_checkpointing` is deprecated")
        # Rightly warns about merging an adapter into a tied head; nothing is merged here.
        warnings.filterwarnings("ignore", message="Model has `tie_word_embeddings=True`")
        yield


def peft_model(base: Path, adapter: Path, dtype: torch.dtype = torch.float64) -> PeftModel:
    """The base model with a saved adapter, trainable."""
    model = AutoModelForCausalLM.from_pretrained(base, dtype=dtype)
    with peft_warnings_expected():
        loaded = PeftModel.from_pretrained(model, adapter, is_trainable=True)
    assert all(p.dtype == dtype for p in loaded.parameters())
    return loaded


def logprobs(model: torch.nn.Module, tokens: Tensor, targets: Tensor) -> Tensor:
    """log p(targets[N] or [N, K]) after each of tokens[N], all logits at once."""
    logits = model(input_ids=tokens[None]).logits[0]
    return logits.log_softmax(-1).gather(1, targets.reshape(len(tokens), -1)).reshape(targets.shape)


def trainable(model: PeftModel) -> dict[str, Tensor]:
    """Adapter weights by the names that peft gives them on disk."""
    return {
        name.replace(".default.", ".").removeprefix("base_model.model."): parameter
        for name, parameter in model.named_parameters()
        if parameter.requires_grad
    }
