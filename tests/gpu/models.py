"""Random base models of several sizes, and work for them."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from transformers import AutoModelForCausalLM, Qwen3Config

from backends.batching import attention
from backends.contract import AdapterSpec
from backends.model import FrozenModel


@dataclass(frozen=True, slots=True)
class Shape:
    """Of a Qwen3 model with tied embeddings."""

    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_size: int
    vocab_size: int


TINY = Shape(64, 128, 2, 4, 2, 16, 256)
LARGER = Shape(128, 256, 3, 4, 2, 32, 1024)
SMALL = Shape(512, 1536, 6, 8, 2, 64, 8192)
BILLIONS = Shape(2560, 9728, 36, 32, 8, 128, 151_936)
"""Qwen3-4B's."""


def random_model(
    shape: Shape, dtype: torch.dtype, device: torch.device, made_on: torch.device
) -> FrozenModel:
    """The same weights for every dtype and device, if made on the same one."""
    attention.register()
    config = Qwen3Config(
        vocab_size=shape.vocab_size,
        hidden_size=shape.hidden_size,
        intermediate_size=shape.intermediate_size,
        num_hidden_layers=shape.num_layers,
        num_attention_heads=shape.num_heads,
        num_key_value_heads=shape.num_kv_heads,
        head_dim=shape.head_size,
        max_position_embeddings=8192,
        tie_word_embeddings=True,
    )
    made_in = dtype if made_on == device else torch.float32
    with torch.random.fork_rng(), made_on:
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(
            config, dtype=made_in, attn_implementation=attention.NAME
        )
    model.to(device=device, dtype=dtype).requires_grad_(False).eval()
    return FrozenModel(model, config, ())


def every_layer(rank: int, seed: int = 0) -> AdapterSpec:
    return AdapterSpec(
        rank=rank, alpha=rank, seed=seed, train_attn=True, train_mlp=True, train_unembed=True
    )
