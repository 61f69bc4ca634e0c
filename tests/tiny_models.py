"""Tiny random base models on disk, for tests of every room."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

VOCAB_SIZE = 256
EOS_TOKEN_ID = 255
MAX_CONTEXT_LENGTH = 512
_SHAPE = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": MAX_CONTEXT_LENGTH,
    "bos_token_id": None,
    "eos_token_id": EOS_TOKEN_ID,
    # Ten times the usual: with 0.02 a tiny model is so flat that wrong answers look right.
    "initializer_range": 0.2,
}


def tiny_llama(path: Path, *, tied: bool = True) -> Path:
    """Write a random Llama of 2 layers, grouped-query attention, float32. Gives back `path`."""
    torch.manual_seed(0)
    LlamaForCausalLM(LlamaConfig(**_SHAPE, tie_word_embeddings=tied)).save_pretrained(path)
    return path


def tiny_qwen3(path: Path) -> Path:
    """Write a random untied Qwen3 (its attention normalizes q and k). Gives back `path`."""
    torch.manual_seed(1)
    config = Qwen3Config(**_SHAPE, head_dim=32, tie_word_embeddings=False)
    Qwen3ForCausalLM(config).save_pretrained(path)
    return path


def tiny_qwen3_moe(path: Path, **changes: Any) -> Path:
    """Write a random untied Qwen3-MoE of 8 experts, two for each token; `changes` are of its
    config. Gives back `path`."""
    torch.manual_seed(2)
    config = Qwen3MoeConfig(
        **_SHAPE
        | {
            "head_dim": 32,
            "tie_word_embeddings": False,
            "num_experts": 8,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 48,
            "norm_topk_prob": True,
        }
        | changes
    )
    Qwen3MoeForCausalLM(config).save_pretrained(path)
    return path


def with_tokenizer(path: Path) -> Path:
    """Add a byte-level tokenizer without merges: token i is byte i, but for 255, a byte that UTF-8
    never uses, which is `<eos>`. Gives back `path`."""
    vocab = {char: byte for byte, char in enumerate(_byte_chars())}
    del vocab[_byte_chars()[EOS_TOKEN_ID]]
    vocab["<eos>"] = EOS_TOKEN_ID
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken("<eos>", special=True)])
    tokenizer.save(str(path / "tokenizer.json"))
    (path / "tokenizer_config.json").write_text(
        json.dumps(
            {
                "tokenizer_class": "PreTrainedTokenizerFast",
                "eos_token": "<eos>",
                "model_max_length": MAX_CONTEXT_LENGTH,
                "clean_up_tokenization_spaces": False,
            }
        )
    )
    return path


def _byte_chars() -> list[str]:
    """The character that stands for each byte in byte-level vocabularies (GPT-2's table): itself
    where it prints, else the next free one from 256 on."""
    printable = {*range(33, 127), *range(161, 173), *range(174, 256)}
    free = iter(range(256, 512))
    return [chr(byte if byte in printable else next(free)) for byte in range(256)]
