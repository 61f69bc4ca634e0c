"""The body of create_custom_loss, as the SDK sends it and as the database keeps it."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import FailFast, Field

from backends.contract import CustomLoss, CustomLossInput, CustomLossNode
from server.core.errors import BadInput
from server.wire.json_shapes import WireModel, parse_json

MAX_LOSSES = 10_000
"""Of one session; its client counts them."""
MAX_INPUTS = 16
MAX_NODES = 10_000
"""Only so that no memory goes into reading more: how many may run is for the backend to say."""
_MAX_DEPTH = 32
_INT64 = 2**63


class InputBody(WireModel):
    name: str = Field(max_length=64)
    rank: int = Field(ge=0, le=2)


class NodeBody(WireModel):
    op: str = Field(max_length=64)
    name: str = Field(max_length=256)
    target: str = Field(max_length=256)
    args: list[Any] = Field(default_factory=list)
    kwargs: dict[str, Any] = Field(default_factory=dict)


class GraphBody(WireModel):
    format: Literal[1] = 1
    nodes: Annotated[list[NodeBody], FailFast()] = Field(max_length=MAX_NODES)


class CreateCustomLoss(WireModel):
    session_id: str
    custom_loss_seq_id: int = Field(ge=0, lt=MAX_LOSSES)
    name: str = Field(max_length=1_000)
    inputs: list[InputBody] = Field(min_length=1, max_length=MAX_INPUTS)
    graph: GraphBody


def read_loss(body: bytes) -> CustomLoss:
    """A stored body as what a backend runs."""
    return loss_of(parse_json(CreateCustomLoss, body))


def loss_of(body: CreateCustomLoss) -> CustomLoss:
    """Raises BadInput for numbers and depths that cannot be passed on."""
    for index, node in enumerate(body.graph.nodes):
        _check(f"graph.nodes[{index}] ({node.name[:80]!r})", [node.args, node.kwargs], 0)
    return CustomLoss(
        name=body.name,
        inputs=tuple(CustomLossInput(name=one.name, rank=one.rank) for one in body.inputs),
        nodes=tuple(
            CustomLossNode(
                op=node.op, name=node.name, target=node.target, args=node.args, kwargs=node.kwargs
            )
            for node in body.graph.nodes
        ),
    )


def _check(where: str, value: Any, depth: int) -> None:
    if depth > _MAX_DEPTH:
        raise BadInput(f"{where}: nests its arguments deeper than {_MAX_DEPTH}.")
    if isinstance(value, int) and not -_INT64 <= value < _INT64:
        raise BadInput(f"{where}: has an integer beyond 64 bits.")
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, list):
        for item in value:
            _check(where, item, depth + 1)
