"""Provenance spans: which sampled sequence each token of a datum came from.

A datum has two lists, one for `model_input` and one for the loss rows; each is consecutive runs
that cover its positions in order (tinker SDK 0.38, `types/provenance_spans.py`,
`Datum.with_provenance`). What the named sequences really were is for `runs.recorded`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

from backends.contract import Datum
from server.core.errors import BadInput

MAX_SPANS = 16_384
"""In one list: each costs far more memory here than the few bytes of an empty one."""


@dataclass(frozen=True, slots=True)
class Span:
    """A run of positions that are [offset, offset + length) of a sequence's prompt or of what
    was sampled for it."""

    kind: Literal["prompt", "sampled"]
    sequence_id: str
    offset: int
    length: int


@dataclass(frozen=True, slots=True)
class Provenance:
    model_input: tuple[Span, ...]
    loss_rows: tuple[Span, ...]


def decode_provenance(where: str, message: Any, datum: Datum) -> Provenance | None:
    """The spans of a datum, or None if it has none. Raises BadInput where they do not cover it."""
    inputs, rows = message.model_input_spans, message.loss_fn_input_spans
    if not inputs and not rows:
        return None
    found = Provenance(
        _spans(f"{where}.model_input_spans", inputs),
        _spans(f"{where}.loss_fn_input_spans", rows),
    )
    _check_cover(f"{where}.model_input_spans", found.model_input, len(datum.tokens))
    targets = datum.loss_inputs.get("target_tokens")
    if targets is not None and targets.ndim == 1:
        _check_cover(f"{where}.loss_fn_input_spans", found.loss_rows, len(targets))
    return found


def placed(where: str, provenance: Provenance) -> Iterator[tuple[bool, str, int, Span]]:
    """Every span of a datum: whether it is one of `model_input`, its place in the request, and
    the position it starts at."""
    for is_input, name, spans in (
        (True, "model_input_spans", provenance.model_input),
        (False, "loss_fn_input_spans", provenance.loss_rows),
    ):
        start = 0
        for index, span in enumerate(spans):
            yield is_input, f"{where}.{name}[{index}]", start, span
            start += span.length


def _spans(where: str, messages: Any) -> tuple[Span, ...]:
    if len(messages) > MAX_SPANS:
        raise BadInput(f"{where}: has {len(messages)} spans; the limit is {MAX_SPANS}.")
    return tuple(_span(f"{where}[{i}]", message) for i, message in enumerate(messages))


def _span(where: str, message: Any) -> Span:
    match message.WhichOneof("span"):
        case "prompt_tokens":
            kind, run = "prompt", message.prompt_tokens
        case "sampled_tokens":
            kind, run = "sampled", message.sampled_tokens
        case _:
            raise BadInput(f"{where}: says neither prompt_tokens nor sampled_tokens.")
    if not run.sequence_id:
        raise BadInput(f"{where}.sequence_id: is empty.")
    for name, number in (("offset", run.offset), ("length", run.length)):
        if number < 0:
            raise BadInput(f"{where}.{name}: is {number}; it must be at least 0.")
    return Span(kind, run.sequence_id, run.offset, run.length)


def _check_cover(where: str, spans: tuple[Span, ...], num_positions: int) -> None:
    covered = sum(span.length for span in spans)
    if covered != num_positions:
        raise BadInput(
            f"{where}: cover {covered} positions; there are {num_positions}, "
            f"and each must be in exactly one span."
        )
