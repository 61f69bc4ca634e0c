"""Stored results, which are protobuf, as the JSON that SDKs before 0.25 read."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from server.core.requests import PASS_KINDS, Kind
from server.wire import schema

_NOTHING = (0, -99999.0)
"""A cell of TopkLogprobs that holds no token."""


def loss_json(encoded: bytes) -> dict[str, Any]:
    """A `ForwardBackwardOutput`. Values may be NaN: the caller picks an encoder."""
    message = schema.ForwardBackwardOutput.FromString(encoded)
    return {
        "loss_fn_output_type": message.loss_fn_output_type,
        "loss_fn_outputs": [
            datum for record in message.loss_fn_outputs for datum in _data_of(record)
        ],
        "metrics": dict(message.metrics),
    }


def sample_json(encoded: bytes) -> dict[str, Any]:
    """A `SampleResponse`, but for targets and alternatives, which those SDKs do not know."""
    message = schema.SampleResponse.FromString(encoded)
    answer: dict[str, Any] = {
        "type": "sample",
        "sequences": [
            {
                "stop_reason": ("stop", "length")[sequence.stop_reason],
                "tokens": np.frombuffer(sequence.tokens, "<i4").tolist(),
                "logprobs": np.frombuffer(sequence.logprobs, "<f4").tolist(),
            }
            for sequence in message.sequences
        ],
    }
    if message.prompt_logprobs:
        logprobs = np.frombuffer(message.prompt_logprobs, "<f4").tolist()
        answer["prompt_logprobs"] = [None if value != value else value for value in logprobs]
    if message.HasField("topk_prompt_logprobs"):
        answer["topk_prompt_logprobs"] = _topk_lists(message.topk_prompt_logprobs)
    return answer


AS_JSON: Mapping[Kind, Callable[[bytes], dict[str, Any]]] = {
    Kind.SAMPLE: sample_json,
    **dict.fromkeys(PASS_KINDS, loss_json),
}
"""By the kind of request; results of other kinds are JSON as they are."""


def _data_of(record: Any) -> list[dict[str, Any]]:
    return [
        {name: _tensor_json(field, index) for name, field in record.fields.items()}
        for index in range(record.num_datums)
    ]


def _tensor_json(field: Any, index: int) -> dict[str, Any]:
    floats = field.dtype == schema.DTYPE_FLOAT32
    start, end = np.frombuffer(field.offsets, "<i8")[index : index + 2]
    values = np.frombuffer(field.data[start:end], "<f4" if floats else "<i8")
    return {
        "data": values.tolist(),
        "dtype": "float32" if floats else "int64",
        "shape": list(values.reshape(-1, *field.trailing_shape).shape),
    }


def _topk_lists(topk: Any) -> list[list[tuple[int, float]] | None]:
    ids = np.frombuffer(topk.token_ids, "<i4").reshape(topk.length, topk.k).tolist()
    logprobs = np.frombuffer(topk.logprobs, "<f4").reshape(topk.length, topk.k).tolist()
    cells = (
        [cell for cell in zip(*row, strict=True) if cell != _NOTHING]
        for row in zip(ids, logprobs, strict=True)
    )
    return [row or None for row in cells]
