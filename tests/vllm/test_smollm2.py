"""A real model with a tied head of 49,152 tokens."""

from __future__ import annotations

import asyncio
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoTokenizer

from backends.contract import SampleResult
from backends.model import FrozenModel
from tests.unit.sampling.material import logprobs, reference
from tests.vllm.material import (
    MAX_NUM_SEQS,
    SMOLLM2,
    own_logprobs,
    request,
    settings,
    started_engine,
    write_adapter,
)

pytestmark = [
    pytest.mark.asyncio(loop_scope="session"),
    pytest.mark.skipif(not SMOLLM2.exists(), reason="make model"),
]

QUESTION = "<|im_start|>user\nWhat is the capital of France?<|im_end|>\n<|im_start|>assistant\n"
SHAPES = ("8 all", "32 attn", "16 mlp", "4 head")


async def test_adapters_on_a_real_model_score_as_peft_does(tmp_path: Path):
    model = FrozenModel.load(SMOLLM2, torch.float32, torch.device("cpu"))
    folders = [write_adapter(model, tmp_path / s, s, std=0.02) for s in SHAPES]
    del model
    tokenizer = AutoTokenizer.from_pretrained(SMOLLM2)
    tokens = np.array(tokenizer(QUESTION)["input_ids"])
    launch = settings(SMOLLM2, max_loras=4, max_num_seqs=MAX_NUM_SEQS, kv_cache_bytes=200_000_000)
    engine = await started_engine(launch, tmp_path)
    try:
        found = await asyncio.gather(
            *(
                engine.sample(request(f"{a}", tokens, adapter=a, prompt_logprobs=True))
                for a in (None, *folders)
            )
        )
    finally:
        await engine.fleet.stop()
    for adapter, got in zip((None, *folders), found, strict=True):
        assert isinstance(got, SampleResult)
        rows = logprobs(reference(SMOLLM2, adapter), tokens)
        np.testing.assert_allclose(got.prompt_logprobs[1:], own_logprobs(rows, tokens), atol=1e-3)
        assert got.sequences[0].tokens[0] == rows[-1].argmax()
    answer = found[0]
    assert isinstance(answer, SampleResult)
    assert tokenizer.decode(answer.sequences[0].tokens.tolist()[:7]) == (
        "The capital of France is Paris."
    )
