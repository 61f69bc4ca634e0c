"""The other side of the comparisons: what one writes with torch, transformers and PEFT alone.
Uses nothing of Hearth's.

Shapes: B sequences of N tokens, E hidden size, V vocabulary.
"""

from __future__ import annotations

from pathlib import Path

import torch
import torch.nn.functional as F
from peft import LoraConfig
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.utils import logging

_TARGETS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj", "lm_head"]
_LOGITS_BYTES = 32 * 2**20


def load_base(path: Path) -> PreTrainedModel:
    """Frozen, float32, with torch's own attention."""
    logging.disable_progress_bar()
    model = AutoModelForCausalLM.from_pretrained(
        path, dtype=torch.float32, attn_implementation="sdpa"
    )
    return model.requires_grad_(False).eval()


def lora_config(rank: int) -> LoraConfig:
    return LoraConfig(r=rank, lora_alpha=rank, target_modules=_TARGETS)


def summed_loss(model: nn.Module, tokens: Tensor, targets: Tensor) -> Tensor:
    """Cross entropy of a PEFT model's causal LM, tokens int64[B, N] and targets likewise. The
    logits are made in chunks of 32 MiB and made again in backward: never a whole [B * N, V]."""
    causal_lm = model.get_submodule("base_model.model")
    hidden = causal_lm.get_submodule("model")(input_ids=tokens, use_cache=False).last_hidden_state
    head = causal_lm.get_submodule("lm_head")
    rows = _LOGITS_BYTES // (4 * causal_lm.get_parameter("model.embed_tokens.weight").shape[0])
    chunks = zip(hidden.flatten(0, 1).split(rows), targets.flatten().split(rows), strict=True)
    losses = [checkpoint(_chunk_loss, head, h, t, use_reentrant=False) for h, t in chunks]
    return torch.stack(losses).sum()


def _chunk_loss(head: nn.Module, hidden: Tensor, targets: Tensor) -> Tensor:
    """hidden[C, E], targets int64[C]"""
    return F.cross_entropy(head(hidden), targets, reduction="sum")
