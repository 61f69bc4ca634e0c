"""Chat messages, to what a template of a text model reads."""

from __future__ import annotations

from collections.abc import Sequence
from reprlib import repr as brief
from typing import Any

from server.oai.errors import BadParameter
from server.oai.wire import ChatMessage

_ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant"}
"""By OpenAI's name, the name that templates know."""
_OF_TOOLS = ("tool_calls", "function_call")


def plain(messages: Sequence[ChatMessage]) -> list[dict[str, str]]:
    """Raises BadParameter for what is no text."""
    return [_plain(f"messages[{i}]", message) for i, message in enumerate(messages)]


def _plain(where: str, message: ChatMessage) -> dict[str, str]:
    role = _ROLES.get(message.role)
    if role is None:
        raise BadParameter(
            f"{where}.role: is {brief(message.role)}; it must be one of {', '.join(_ROLES)}.",
            f"{where}.role",
        )
    for name in _OF_TOOLS:
        if (message.model_extra or {}).get(name):
            param = f"{where}.{name}"
            raise BadParameter(f"{param}: tools are not supported here.", param)
    return {"role": role, "content": _text(f"{where}.content", message.content)}


def _text(where: str, content: object) -> str:
    match content:
        case str():
            return content
        case [_, *_]:
            return "".join(_part(f"{where}[{i}]", part) for i, part in enumerate(content))
        case None:
            raise BadParameter(f"{where}: is missing.", where)
    message = f"{where}: is {brief(content)}; it must be a string or a list of text parts."
    raise BadParameter(message, where)


def _part(where: str, part: Any) -> str:
    match part:
        case {"type": "text", "text": str(text)}:
            return text
        case {"type": str(kind)} if kind != "text":
            message = f"{where}: is of type {brief(kind)}; this model reads text only."
        case _:
            message = f"{where}: is {brief(part)}; it must be an object with type and text."
    raise BadParameter(message, where)
