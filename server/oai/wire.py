"""The bodies of OpenAI's chat and legacy completions, checked."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from reprlib import repr as brief
from types import MappingProxyType
from typing import Annotated, Any, TypeVar

from pydantic import ConfigDict, FailFast, Field, ValidationError

from server.core.errors import BadInput
from server.oai.errors import BadParameter
from server.wire.json_shapes import WireModel, parse_json

MAX_STOPS = 16
MAX_STOP_LENGTH = 1000

UNSUPPORTED: Mapping[str, Sequence[object]] = MappingProxyType(
    {
        "frequency_penalty": (0,),
        "presence_penalty": (0,),
        "repetition_penalty": (1,),
        "min_p": (0,),
        "logit_bias": ({},),
        "suffix": ("",),
        "tools": ([],),
        "tool_choice": ("none", "auto"),
        "functions": ([],),
        "function_call": ("none", "auto"),
        "response_format": ({"type": "text"},),
        "modalities": (["text"],),
        "audio": (),
        "web_search_options": (),
        "prediction": (),
    }
)
"""What would change the answer and cannot be had, with the values that ask for nothing. Other
parameters that are not known here are ignored, as OpenAI's own servers do with `user`."""


class StreamOptions(WireModel):
    include_usage: bool = False


class CommonBody(WireModel):
    """What both dialects share."""

    model_config = ConfigDict(extra="allow")

    model: str
    temperature: float = Field(default=1.0, ge=0, le=2)
    top_p: float = Field(default=1.0, gt=0, le=1)
    top_k: int = Field(default=-1, ge=-1)
    """Not OpenAI's, but what other servers take beside; 0 and -1 set no limit."""
    n: int = Field(default=1, ge=1, le=128)
    seed: int | None = None
    stop: object = None
    stream: bool = False
    stream_options: StreamOptions = StreamOptions()

    def stops(self) -> tuple[str, ...]:
        stops = self.stop if isinstance(self.stop, list) else [self.stop]
        stops = [] if self.stop is None else stops
        if not all(isinstance(stop, str) and stop for stop in stops):
            raise BadParameter("stop: must be a string or a list of strings, none empty.", "stop")
        if len(stops) > MAX_STOPS or any(len(stop) > MAX_STOP_LENGTH for stop in stops):
            limit = f"{MAX_STOPS} strings of {MAX_STOP_LENGTH} characters"
            raise BadParameter(f"stop: more than {limit}.", "stop")
        return tuple(stops)


class ChatMessage(WireModel):
    model_config = ConfigDict(extra="allow")

    role: str
    content: object = None


class ChatBody(CommonBody):
    messages: Annotated[list[ChatMessage], FailFast(), Field(min_length=1)]
    max_tokens: int | None = Field(default=None, ge=1)
    max_completion_tokens: int | None = Field(default=None, ge=1)
    logprobs: bool = False
    top_logprobs: int = Field(default=0, ge=0, le=20)
    chat_template_kwargs: dict[str, Any] = Field(default_factory=dict)
    """Not OpenAI's: variables of the model's own chat template, such as `enable_thinking`."""


class CompletionBody(CommonBody):
    prompt: object = None
    max_tokens: int = Field(default=16, ge=0)
    logprobs: int | None = Field(default=None, ge=0, le=20)
    echo: bool = False
    best_of: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Order:
    """What either dialect asks of an engine, once for each prompt."""

    model: str
    n: int
    max_tokens: int | None
    """None is as many as fit."""
    temperature: float
    top_p: float
    top_k: int
    seed: int | None
    stops: tuple[str, ...]
    topk: int | None
    """How many alternatives of each token are told; None tells no logprobs at all."""
    echo: bool = False
    """Whether the prompt is told too, with its logprobs if there are any."""


Body = TypeVar("Body", bound=CommonBody)


def parse(model: type[Body], raw: bytes) -> Body:
    """Raises BadParameter for the first thing that is wrong or not supported."""
    try:
        body = parse_json(model, raw)
    except BadInput as error:
        raise BadParameter(str(error), _param(error.__cause__)) from error
    for name, neutral in UNSUPPORTED.items():
        given = (body.model_extra or {}).get(name)
        if given is not None and given not in neutral:
            raise BadParameter(f"{name}: is {brief(given)}, which is not supported here.", name)
    return body


def _param(cause: object) -> str | None:
    if isinstance(cause, ValidationError):
        location = cause.errors(include_url=False, include_context=False)[0]["loc"]
        return str(location[0]) if location else None
    return None


def chat_order(body: ChatBody) -> Order:
    if body.top_logprobs and not body.logprobs:
        raise BadParameter("top_logprobs: needs logprobs, which is off.", "top_logprobs")
    most = body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens
    return _order(body, most, body.top_logprobs if body.logprobs else None)


def completion_order(body: CompletionBody) -> Order:
    if body.best_of not in (None, body.n):
        raise BadParameter("best_of: is not supported here, unless it is n.", "best_of")
    if body.echo and body.stream and body.logprobs is not None:
        raise BadParameter("echo: cannot be had with both stream and logprobs.", "echo")
    return _order(body, body.max_tokens, body.logprobs, echo=body.echo)


def _order(body: CommonBody, max_tokens: int | None, topk: int | None, echo: bool = False) -> Order:
    return Order(
        model=body.model,
        n=body.n,
        max_tokens=max_tokens,
        temperature=body.temperature,
        top_p=body.top_p,
        top_k=body.top_k or -1,
        seed=None if body.seed is None else body.seed % 2**63,
        stops=body.stops(),
        topk=topk,
        echo=echo,
    )
