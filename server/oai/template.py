"""Chat templates, with the conventions that `transformers` gives them, and without it.

A template comes with a model, so it is code of a stranger: it runs in jinja2's sandbox, sees plain
values only, and has no loader.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

import jinja2
from jinja2.ext import Extension, loopcontrols
from jinja2.nodes import Node
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

_SPECIAL = ("bos", "eos", "unk", "sep", "pad", "cls", "mask")
_RENDER_ERRORS = (jinja2.TemplateError, TypeError, ValueError, LookupError, ArithmeticError)
"""What a template raises over messages that it does not like."""


class TemplateRefused(Exception):
    """The template cannot be rendered; the message says why."""


class ChatTemplate:
    def __init__(self, source: str, special_tokens: Mapping[str, str]) -> None:
        """Raises TemplateRefused when it cannot be compiled."""
        self._special_tokens = dict(special_tokens)
        try:
            self._template = _environment().from_string(source)
        except jinja2.TemplateError as error:
            raise TemplateRefused(f"the chat template cannot be compiled: {error}") from error

    @classmethod
    def load(cls, folder: Path) -> ChatTemplate | None:
        """The template of a model folder, if it has one: `chat_template.jinja` comes before
        `tokenizer_config.json`, as in `transformers`."""
        config = _json(folder / "tokenizer_config.json")
        source = _source(folder, config)
        return None if source is None else cls(source, _special_tokens(config))

    def render(
        self, messages: Sequence[Mapping[str, str]], variables: Mapping[str, Any] | None = None
    ) -> str:
        """The prompt that asks for the next message. `variables` are the template's own, such as
        `enable_thinking`. Raises TemplateRefused, often in the template's own words."""
        values = {
            "tools": None,
            "documents": None,
            **self._special_tokens,
            **(variables or {}),
            "messages": [dict(message) for message in messages],
            "add_generation_prompt": True,
        }
        try:
            return self._template.render(values)
        except _RENDER_ERRORS as error:
            raise TemplateRefused(f"the chat template refused the messages: {error}") from error


class _Generation(Extension):
    """`{% generation %}` marks what the assistant said, for training; here it only renders."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Parser) -> list[Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class _Namespace(Namespace):
    """Without names that Python itself reads."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        attributes = dict(*args, **kwargs)
        for name in attributes:
            _check_name(name)
        super().__init__(attributes)

    def __setitem__(self, name: str, value: Any) -> None:
        _check_name(name)
        super().__setitem__(name, value)


def _check_name(name: str) -> None:
    if name.startswith("_"):
        raise jinja2.TemplateError(f"a template may not set {name!r}")


def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    names: dict[str, Any] = {
        "raise_exception": _raise_exception,
        "strftime_now": _strftime_now,
        "namespace": _Namespace,
    }
    environment.globals.update(names)
    return environment


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """jinja2's own escapes HTML."""
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _strftime_now(form: str) -> str:
    return datetime.now().strftime(form)


def _json(file: Path) -> dict[str, Any]:
    return json.loads(file.read_text()) if file.exists() else {}


def _source(folder: Path, config: Mapping[str, Any]) -> str | None:
    if (file := folder / "chat_template.jinja").exists():
        return file.read_text()
    found = config.get("chat_template") or _json(folder / "chat_template.json").get("chat_template")
    if isinstance(found, list):  # several, by name
        found = {one["name"]: one["template"] for one in found}
    return found.get("default") if isinstance(found, dict) else found


def _special_tokens(config: Mapping[str, Any]) -> dict[str, str]:
    named = {f"{name}_token": config.get(f"{name}_token") for name in _SPECIAL}
    return {
        name: token["content"] if isinstance(token, dict) else token
        for name, token in named.items()
        if token
    }
