"""Graphs written by hand, as an attacker would."""

from __future__ import annotations

from typing import Any

from backends.contract import CustomLoss, CustomLossInput, CustomLossNode

X = {"ref": "x"}


def ref(name: str) -> dict[str, str]:
    return {"ref": name}


def tup(*items: Any) -> dict[str, Any]:
    return {"tuple": list(items)}


def node(op: str, name: str, target: str, *args: Any, **kwargs: Any) -> CustomLossNode:
    return CustomLossNode(op=op, name=name, target=target, args=list(args), kwargs=kwargs)


def call(name: str, target: str, *args: Any, **kwargs: Any) -> CustomLossNode:
    return node("call_function", name, target, *args, **kwargs)


def method(name: str, target: str, *args: Any, **kwargs: Any) -> CustomLossNode:
    return node("call_method", name, target, *args, **kwargs)


def graph(
    *steps: CustomLossNode,
    loss: str = "loss",
    metrics: dict[str, Any] | None = None,
    inputs: tuple[tuple[str, int], ...] = (("logprobs", 1),),
    output: CustomLossNode | None = None,
) -> CustomLoss:
    """logprobs is node `x`; the others have their own names."""
    names = ["x", *(name for name, _ in inputs[1:])]
    placeholders = [
        node("placeholder", name, declared)
        for name, (declared, _) in zip(names, inputs, strict=True)
    ]
    end = output or node("output", "output", "output", tup(ref(loss), {"dict": metrics or {}}))
    return CustomLoss(
        name="hostile",
        inputs=tuple(CustomLossInput(name=name, rank=rank) for name, rank in inputs),
        nodes=(*placeholders, *steps, end),
    )


SUM = method("loss", "sum", X)
