"""The result of a `forward_backward`, to protobuf."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import groupby
from typing import Any

import numpy as np

from backends.contract import LossResult
from server.wire import schema

_OUTPUT_TYPE = "TorchLossReturn"
_Output = Mapping[str, np.ndarray]


def encode_loss_result(result: LossResult) -> bytes:
    """A `ForwardBackwardOutput`.

    A record holds one trailing shape, so neighbours that agree on it share a record and a
    [N, K] of another K starts the next; the client concatenates records in order.
    """
    names = {frozenset(output) for output in result.outputs}
    assert len(names) <= 1, "the datums of one result have different outputs"
    message = schema.ForwardBackwardOutput(loss_fn_output_type=_OUTPUT_TYPE)
    for _, group in groupby(result.outputs, key=_trailing_shapes):
        _add_record(message.loss_fn_outputs.add(type_tag=_OUTPUT_TYPE), list(group))
    for name, value in result.metrics.items():
        message.metrics[name] = value
    return message.SerializeToString()


def _trailing_shapes(output: _Output) -> dict[str, tuple[int, ...]]:
    return {name: array.shape[1:] for name, array in output.items()}


def _add_record(record: Any, outputs: Sequence[_Output]) -> None:
    record.num_datums = len(outputs)
    for name in outputs[0]:
        arrays = [_wire_array(output[name]) for output in outputs]
        field = record.fields[name]
        field.data = b"".join(array.tobytes() for array in arrays)
        ends = np.cumsum([0, *(array.nbytes for array in arrays)], dtype="<i8")
        field.offsets = ends.tobytes()
        field.dtype = schema.DTYPE_FLOAT32 if arrays[0].dtype.kind == "f" else schema.DTYPE_INT64
        field.trailing_shape.extend(arrays[0].shape[1:])


def _wire_array(array: np.ndarray) -> np.ndarray:
    """The two dtypes a client knows."""
    return array.astype("<f4" if array.dtype.kind == "f" else "<i8", copy=False)
