"""Tensors as they travel, in protobuf or JSON, to numpy arrays.

`where` in every function is the place in the request, for the refusal.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from reprlib import repr as brief
from typing import Any

import numpy as np

from server.core.errors import BadInput
from server.wire import schema

MAX_TARGETS = 1024
"""Columns of a [N, K] tensor."""
MAX_DENSE_CELLS = 2**26
"""Cells that the sparse tensors of one request may unpack to, all together: a row of a sparse
tensor costs its sender 8 bytes and us K cells."""

_WIRE_DTYPES = {
    schema.DTYPE_FLOAT32: np.dtype("<f4"),
    schema.DTYPE_INT64: np.dtype("<i8"),
    schema.DTYPE_INT32: np.dtype("<i4"),
    schema.DTYPE_BFLOAT16: np.dtype("<u2"),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class SparseLayout:
    """Which cells of a [rows, columns] tensor are listed (CSR)."""

    shape: tuple[int, int]
    crow: np.ndarray
    """int64[rows + 1]"""
    col: np.ndarray
    """int64[cells], increasing within a row"""

    @property
    def rows(self) -> np.ndarray:
        """int64[cells]: the row of each listed cell."""
        return np.repeat(np.arange(self.shape[0]), np.diff(self.crow))


@dataclass(frozen=True, slots=True, kw_only=True)
class FlatTensor:
    """A tensor as it was sent, with nothing checked but the types."""

    values: np.ndarray
    """float32 or int64, one-dimensional and our own"""
    shape: tuple[int, ...]
    """Empty: one-dimensional, as long as the values."""
    crow: np.ndarray | None = None
    col: np.ndarray | None = None

    @property
    def is_sparse(self) -> bool:
        return self.crow is not None or self.col is not None


class CellBudget:
    """Counts the cells that one request's sparse tensors unpack to."""

    def __init__(self, limit: int = MAX_DENSE_CELLS) -> None:
        self.limit = limit
        self.left = limit

    def take(self, where: str, cells: int) -> None:
        if cells > self.left:
            raise BadInput(
                f"{where}: unpacks to {cells} cells, {self.left} are left of the "
                f"{self.limit} that the sparse tensors of a request may have."
            )
        self.left -= cells


def array_of(where: str, raw: bytes, dtype: np.dtype[Any]) -> np.ndarray:
    """The little-endian bytes as a one-dimensional array that the caller owns."""
    check_whole(where, raw, dtype)
    return np.frombuffer(raw, dtype=dtype).copy()


def check_whole(where: str, raw: bytes, dtype: np.dtype[Any]) -> None:
    if len(raw) % dtype.itemsize:
        raise BadInput(
            f"{where}: {len(raw)} bytes is not a multiple of {dtype.itemsize}, "
            f"the size of one {dtype.name}."
        )


def flat_from_protobuf(where: str, message: Any) -> FlatTensor:
    """Read a `Tensor`; bfloat16 widens to float32 and int32 to int64."""
    dtype = _WIRE_DTYPES.get(message.dtype)
    if dtype is None:
        raise BadInput(
            f"{where}: dtype is {message.dtype}; it must be 1 (float32), 2 (int64), "
            f"3 (int32) or 4 (bfloat16)."
        )
    shape = tuple(message.shape)
    match message.WhichOneof("encoding"):
        case "dense":
            return FlatTensor(values=_widened(array_of(where, message.dense, dtype)), shape=shape)
        case "sparse_csr":
            csr, index = message.sparse_csr, np.dtype("<i8")
            return FlatTensor(
                values=_widened(array_of(f"{where}.values", csr.values, dtype)),
                shape=shape,
                crow=array_of(f"{where}.crow_indices", csr.crow_indices, index),
                col=array_of(f"{where}.col_indices", csr.col_indices, index),
            )
        case _:
            raise BadInput(f"{where}: has neither dense nor sparse values.")


def _widened(array: np.ndarray) -> np.ndarray:
    if array.dtype == np.uint16:
        # A bfloat16 is the upper half of a float32.
        return (array.astype(np.uint32) << 16).view(np.float32)
    return array.astype(np.float32 if array.dtype.kind == "f" else np.int64, copy=False)


def to_dense(where: str, tensor: FlatTensor, budget: CellBudget, *, fill: int = 0) -> np.ndarray:
    """Shape [N] or [N, K]; cells that a sparse tensor does not list are `fill`."""
    _check_shape(where, tensor.shape)
    if tensor.is_sparse:
        layout = sparse_layout(where, tensor)
        budget.take(where, math.prod(layout.shape))
        dense = np.full(layout.shape, fill, dtype=tensor.values.dtype)
        dense[layout.rows, layout.col] = tensor.values
        return dense
    shape = tensor.shape or (len(tensor.values),)
    if math.prod(shape) != len(tensor.values):
        raise BadInput(
            f"{where}: shape {brief(list(shape))} holds {math.prod(shape)} values, "
            f"{len(tensor.values)} were sent."
        )
    return tensor.values.reshape(shape)


def _check_shape(where: str, shape: tuple[int, ...]) -> None:
    if len(shape) > 2:
        raise BadInput(f"{where}: has {len(shape)} dimensions; the limit is 2.")
    if any(size < 0 for size in shape):
        raise BadInput(f"{where}: shape {brief(list(shape))} has a negative size; the least is 0.")
    if len(shape) == 2 and shape[1] > MAX_TARGETS:
        raise BadInput(f"{where}: has {shape[1]} columns; the limit is {MAX_TARGETS}.")


def sparse_layout(where: str, tensor: FlatTensor) -> SparseLayout:
    """Check the row pointers and columns against the shape and the number of values."""
    crow, col, cells = tensor.crow, tensor.col, len(tensor.values)
    if crow is None or col is None:
        raise BadInput(f"{where}: a sparse tensor needs both crow_indices and col_indices.")
    _check_shape(where, tensor.shape)
    if len(tensor.shape) != 2:
        raise BadInput(f"{where}: a sparse tensor has {len(tensor.shape)} dimensions; it needs 2.")
    rows, columns = tensor.shape
    if len(crow) != rows + 1:
        raise BadInput(
            f"{where}: crow_indices has {len(crow)} entries; {rows} rows need {rows + 1}."
        )
    if len(col) != cells:
        raise BadInput(f"{where}: col_indices has {len(col)} entries for {cells} values.")
    # The range first: differences of values beyond it could wrap around.
    if crow.min() < 0 or crow.max() > cells or (np.diff(crow) < 0).any():
        raise BadInput(f"{where}: crow_indices must rise from 0 to {cells}, the number of values.")
    if crow[0] != 0 or crow[-1] != cells:
        raise BadInput(
            f"{where}: crow_indices runs from {crow[0]} to {crow[-1]}; "
            f"it must run from 0 to {cells}."
        )
    if cells and (col.min() < 0 or col.max() >= columns):
        worst = col.min() if col.min() < 0 else col.max()
        raise BadInput(f"{where}: col_indices has {worst}; columns are 0 to {columns - 1}.")
    layout = SparseLayout(shape=(rows, columns), crow=crow, col=col)
    if ((np.diff(col) <= 0) & (np.diff(layout.rows) == 0)).any():
        raise BadInput(f"{where}: col_indices must increase within a row.")
    return layout
