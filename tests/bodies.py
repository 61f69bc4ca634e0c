"""Request bodies as clients send them, in JSON."""

from __future__ import annotations

import json
from typing import Any


def datum(tokens: list[int]) -> dict[str, Any]:
    return {
        "model_input": {"chunks": [{"type": "encoded_text", "tokens": tokens}]},
        "loss_fn_inputs": {
            "target_tokens": {"data": tokens, "dtype": "int64", "shape": [len(tokens)]}
        },
    }


def forward_backward(run: str, seq: int, *data: list[int], backward: bool = True) -> dict[str, Any]:
    """A datum for each list of tokens."""
    content = {"data": [datum(tokens) for tokens in data], "loss_fn": "cross_entropy"}
    field = "forward_backward_input" if backward else "forward_input"
    return {"model_id": run, "seq_id": seq, field: content}


def optim_step(run: str, seq: int, learning_rate: float = 0.01) -> dict[str, Any]:
    return {"model_id": run, "seq_id": seq, "adam_params": {"learning_rate": learning_rate}}


def sample(sampler: str, seq: int, prompt: list[int], **more: Any) -> dict[str, Any]:
    return {
        "sampling_session_id": sampler,
        "seq_id": seq,
        "num_samples": 1,
        "prompt": {"chunks": [{"type": "encoded_text", "tokens": prompt}]},
        "sampling_params": {"max_tokens": 3},
        **more,
    }


def encoded(body: dict[str, Any]) -> bytes:
    return json.dumps(body).encode()
