"""The four forms in which OpenAI takes a prompt."""

from __future__ import annotations

from reprlib import repr as brief
from typing import Annotated, Any

import numpy as np
from pydantic import FailFast, TypeAdapter, ValidationError

from server.oai.errors import BadParameter
from server.oai.wire import CompletionBody
from server.wire.json_shapes import Int64

MAX_PROMPTS = 2048
_TOKENS: TypeAdapter[list[int]] = TypeAdapter(Annotated[list[Int64], FailFast()])


def read_prompts(body: CompletionBody) -> list[str | np.ndarray]:
    """Each prompt, as text or as int64[T]."""
    match body.prompt:
        case str() as text:
            return [text]
        case [int(), *_] as tokens:
            return [_tokens("prompt", tokens)]
        case [_, *_] as several if len(several) <= MAX_PROMPTS:
            return [_prompt(f"prompt[{i}]", one) for i, one in enumerate(several)]
        case [_, *_] as several:
            message = f"prompt: holds {len(several)} prompts; the limit is {MAX_PROMPTS}."
            raise BadParameter(message, "prompt")
    raise BadParameter(
        "prompt: must be a string, a list of strings, of token ids, or of lists of token ids.",
        "prompt",
    )


def _prompt(where: str, prompt: object) -> str | np.ndarray:
    if isinstance(prompt, str):
        return prompt
    if isinstance(prompt, list):
        return _tokens(where, prompt)
    message = f"{where}: is {brief(prompt)}; it must be a string or a list of token ids."
    raise BadParameter(message, "prompt")


def _tokens(where: str, tokens: list[Any]) -> np.ndarray:
    try:
        return np.array(_TOKENS.validate_python(tokens, strict=True), np.int64)
    except ValidationError as error:
        raise BadParameter(f"{where}: must hold token ids only.", "prompt") from error
