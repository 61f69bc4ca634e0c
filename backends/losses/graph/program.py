"""A client's graph, checked node by node and turned into steps to run.

Nothing of it is evaluated: names are looked up in `tables.py`, and what is not there is refused.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from backends.contract import CustomLoss, CustomLossNode
from backends.losses.base import LossRefusedError
from backends.losses.graph.arguments import Ref, num_items, read
from backends.losses.graph.keywords import keywords
from backends.losses.graph.limits import (
    MAX_INPUTS,
    MAX_METRICS,
    MAX_NODES,
    RefusedError,
    check_length,
)
from backends.losses.graph.operations import ATTRIBUTES, Operation
from backends.losses.graph.reasons import why_not
from backends.losses.graph.tables import FUNCTIONS, METHODS, public_name

_INPUT_NAME = re.compile(r"[a-z_][a-z0-9_]{0,63}")
_METRIC = re.compile(r"custom/[a-z0-9_./-]{1,64}:(sum|mean)")
_MAX_NAME = 128


@dataclass(frozen=True, slots=True)
class Step:
    name: str
    target: str
    operation: Operation
    args: tuple[Any, ...]
    """With a Ref where an earlier step's value goes."""
    kwargs: dict[str, Any]


@dataclass(frozen=True, slots=True)
class Program:
    inputs: tuple[str, ...]
    """Node names, in the order of the loss's inputs."""
    steps: tuple[Step, ...]
    loss: str
    metrics: dict[str, str]
    """Metric to node."""


def refusal(loss: CustomLoss) -> str | None:
    """Why the graph cannot be taken, or None."""
    try:
        compiled(loss)
    except LossRefusedError as error:
        return str(error)
    return None


def compiled(loss: CustomLoss) -> Program:
    """Raises LossRefusedError, which names the node."""
    _check_inputs(loss)
    if not 2 <= len(loss.nodes) <= MAX_NODES:
        raise LossRefusedError(
            f"the graph has {len(loss.nodes)} nodes; it may have 2 to {MAX_NODES}"
        )
    known: dict[str, object] = {}
    steps: list[Step] = []
    for position, node in enumerate(loss.nodes[:-1]):
        try:
            _check_name(node, known)
            if position < len(loss.inputs):
                _check_placeholder(node, loss.inputs[position].name)
            else:
                steps.append(_step(node, known))
        except RefusedError as error:
            raise LossRefusedError(f"node {node.name[:_MAX_NAME]!r} {error}") from error
        known[node.name] = node
    last = loss.nodes[-1]
    try:
        _check_name(last, known)
        result, metrics = _output(last, known)
    except RefusedError as error:
        raise LossRefusedError(f"node {last.name[:_MAX_NAME]!r} {error}") from error
    inputs = tuple(node.name for node in loss.nodes[: len(loss.inputs)])
    return Program(inputs, tuple(steps), result, metrics)


def _check_inputs(loss: CustomLoss) -> None:
    names = [declared.name for declared in loss.inputs]
    if not 1 <= len(names) <= MAX_INPUTS:
        raise LossRefusedError(f"it has {len(names)} inputs; it may have 1 to {MAX_INPUTS}")
    if names[0] != "logprobs" or loss.inputs[0].rank not in (1, 2):
        raise LossRefusedError("its first input must be logprobs, of rank 1 or 2")
    for declared in loss.inputs:
        if not _INPUT_NAME.fullmatch(declared.name) or names.count(declared.name) > 1:
            raise LossRefusedError(
                f"input {declared.name[:_MAX_NAME]!r} must be a lowercase name, used once"
            )
        if declared.rank not in (0, 1, 2):
            raise LossRefusedError(f"input {declared.name} has rank {declared.rank}, not 0 to 2")


def _check_name(node: CustomLossNode, known: Mapping[str, object]) -> None:
    if not 0 < len(node.name) <= _MAX_NAME or node.name in known:
        raise RefusedError(f"must have a name of its own, of at most {_MAX_NAME} characters")


def _check_placeholder(node: CustomLossNode, name: str) -> None:
    if node.op != "placeholder" or node.target != name or node.args or node.kwargs:
        raise RefusedError(f"must be the placeholder of input {name}, without a default")


def _step(node: CustomLossNode, known: Mapping[str, object]) -> Step:
    operation, target = _operation(node)
    if len(node.args) > operation.most_args:
        raise RefusedError(
            f"gives {target} {len(node.args)} positional arguments; "
            f"it takes at most {operation.most_args}"
        )
    args = tuple(read(list(node.args), known))
    if node.op == "call_method" and not (args and isinstance(args[0], Ref)):
        raise RefusedError(f"calls {target} on something that is no node")
    if target == "getattr" and not (
        len(args) == 2 and isinstance(args[1], str) and args[1] in ATTRIBUTES
    ):
        raise RefusedError(
            f"reads {args[1:]!r:.80}; attributes are {', '.join(sorted(ATTRIBUTES))}"
        )
    kwargs = keywords(node, target, known)
    check_length(num_items(args) + num_items(list(kwargs.values())))
    return Step(node.name, target, operation, args, kwargs)


def _operation(node: CustomLossNode) -> tuple[Operation, str]:
    match node.op:
        case "call_function":
            target, table = public_name(node.target), FUNCTIONS
        case "call_method":
            target, table = node.target, METHODS
        case _:
            raise RefusedError(
                f"is a {node.op[:40]!r}; after the inputs come call_function and call_method"
            )
    if target not in table:
        raise RefusedError(why_not(node.op, node.target))
    return table[target], target


def _output(node: CustomLossNode, known: Mapping[str, object]) -> tuple[str, dict[str, str]]:
    """The nodes of the loss and of each metric."""
    if node.op != "output" or node.kwargs or len(node.args) != 1:
        raise RefusedError("must be the output, and the last node must be one")
    pair = node.args[0]
    if isinstance(pair, dict) and list(pair) == ["tuple"]:
        pair = pair["tuple"]
    if not isinstance(pair, list | tuple) or len(pair) != 2:
        raise RefusedError("must return (loss, metrics)")
    metrics = pair[1].get("dict") if isinstance(pair[1], dict) and len(pair[1]) == 1 else None
    if not isinstance(metrics, dict) or len(metrics) > MAX_METRICS:
        raise RefusedError(f"must return its metrics as a dict of at most {MAX_METRICS}")
    for name in metrics:
        if not (isinstance(name, str) and _METRIC.fullmatch(name)):
            raise RefusedError(
                f"returns the metric {str(name)[:80]!r}; it must be named custom/<name>:sum "
                "or custom/<name>:mean"
            )
    nodes = [_node(pair[0], known), *(_node(value, known) for value in metrics.values())]
    return nodes[0], dict(zip(metrics, nodes[1:], strict=True))


def _node(value: Any, known: Mapping[str, object]) -> str:
    template = read(value, known)
    if not isinstance(template, Ref):
        raise RefusedError("must return nodes, the loss and every metric")
    return template.name
