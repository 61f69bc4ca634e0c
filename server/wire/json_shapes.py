"""JSON bodies to checked models, and the shapes that training and sampling bodies share."""

from __future__ import annotations

from collections.abc import Sequence
from reprlib import repr as brief
from typing import Annotated, Any, Literal, TypeVar

import numpy as np
from pydantic import (
    BaseModel,
    ConfigDict,
    FailFast,
    Field,
    TypeAdapter,
    ValidationError,
    model_validator,
)

from server.core.errors import BadInput
from server.wire.bounds import check_json
from server.wire.tensors import FlatTensor

Int64 = Annotated[int, Field(ge=-(2**63), le=2**63 - 1)]
# What may be long stops at its first wrong item: pydantic's record of each would fill the memory.
_INTEGERS: TypeAdapter[list[int]] = TypeAdapter(Annotated[list[Int64], FailFast()])
_FLOATS: TypeAdapter[list[float]] = TypeAdapter(Annotated[list[float], FailFast()])


class WireModel(BaseModel):
    """A JSON object of the wire: unknown fields are ignored, since clients are newer than we
    are, and null is the same as absent, since older clients send both. Strict: text or a
    boolean is no number, since a program that sends one has a bug. (So a field is declared as
    what JSON has: list, not tuple; str, not datetime.)"""

    model_config = ConfigDict(extra="ignore", frozen=True, strict=True)

    @model_validator(mode="before")
    @classmethod
    def _null_is_absent(cls, value: Any) -> Any:
        if isinstance(value, dict):
            return {name: part for name, part in value.items() if part is not None}
        return value


class Numbers(WireModel):
    """Settings where null is a mistake: it is how the SDK writes NaN and infinity, and a default
    in its place would hide that."""

    @model_validator(mode="before")
    @classmethod
    def _null_is_absent(cls, value: Any) -> Any:
        return value


Model = TypeVar("Model", bound=WireModel)


def parse_json(model: type[Model], body: bytes) -> Model:
    """Read a JSON body; BadInput names the first field that is wrong and its value."""
    check_json(body)
    try:
        return model.model_validate_json(body)
    except ValidationError as error:
        raise _refusal(error) from error


def parse_object(model: type[Model], value: object, where: str) -> Model:
    """Like `parse_json`, for a part of a body that was read before."""
    try:
        return model.model_validate(value)
    except ValidationError as error:
        raise _refusal(error, where) from error


def _refusal(error: ValidationError, where: str = "") -> BadInput:
    """The first of pydantic's findings as one sentence."""
    first = error.errors(include_url=False, include_context=False)[0]
    if first["type"] == "json_invalid":
        return BadInput(f"The request body is not JSON: {first['msg']}.")
    place = _place(where, first["loc"]) or "The request body"
    if first["type"] == "missing":
        return BadInput(f"{place}: is missing.")
    if first["type"] == "model_type":
        return BadInput(f"{place}: Input should be an object, got {brief(first['input'])}.")
    return BadInput(f"{place}: {first['msg']}, got {brief(first['input'])}.")


def _place(where: str, location: Sequence[int | str]) -> str:
    for part in location:
        if isinstance(part, int):
            where += f"[{part}]"
        else:
            where += f".{part[:60]}" if where else part[:60]
    return where


def _integers(where: str, values: list[Any]) -> np.ndarray:
    return np.array(_checked(where, values, _INTEGERS), dtype=np.int64)


def _checked(where: str, values: list[Any], numbers: TypeAdapter[Any]) -> list[Any]:
    try:
        return numbers.validate_python(values, strict=True)
    except ValidationError as error:
        raise _refusal(error, where) from error


class ChunkBody(WireModel):
    """One chunk of a model input; clients before 0.18 leave `type` out."""

    type: str = ""
    tokens: list[Any] | None = None


class ModelInputBody(WireModel):
    chunks: Annotated[list[ChunkBody], FailFast()]

    def tokens(self, where: str) -> np.ndarray:
        """int64[N]: all chunks as one. Only text can be read."""
        parts = [_text(f"{where}.chunks[{i}]", chunk) for i, chunk in enumerate(self.chunks)]
        return np.concatenate([np.empty(0, dtype=np.int64), *parts])


def _text(where: str, chunk: ChunkBody) -> np.ndarray:
    if chunk.type not in ("", "encoded_text"):
        raise BadInput(not_text(where, chunk.type))
    if chunk.tokens is None:
        raise BadInput(f"{where}: has no tokens; this model reads encoded_text chunks only.")
    return _integers(f"{where}.tokens", chunk.tokens)


def not_text(where: str, kind: str) -> str:
    return f"{where}: is of type {brief(kind)}; this model reads encoded_text chunks only."


class TensorBody(WireModel):
    """A tensor before its numbers are checked, which `flat` does by dtype."""

    data: list[Any]
    dtype: Literal["float32", "int64", "int32", "bfloat16"]
    shape: Annotated[list[Int64], FailFast()] = Field(default_factory=list)
    sparse_crow_indices: list[Any] | None = None
    sparse_col_indices: list[Any] | None = None

    def flat(self, where: str) -> FlatTensor:
        crow, col = self.sparse_crow_indices, self.sparse_col_indices
        return FlatTensor(
            values=self._values(f"{where}.data"),
            shape=tuple(self.shape),
            crow=None if crow is None else _integers(f"{where}.sparse_crow_indices", crow),
            col=None if col is None else _integers(f"{where}.sparse_col_indices", col),
        )

    def _values(self, where: str) -> np.ndarray:
        if self.dtype in ("int64", "int32"):
            return _integers(where, self.data)
        # Beyond float32 is infinite, which the check of the input refuses by its name.
        with np.errstate(over="ignore"):
            numbers = _checked(where, self.data, _FLOATS)
            return np.array(numbers, dtype=np.float64).astype(np.float32)
