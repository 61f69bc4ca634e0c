"""Losses as the real SDK traces and runs them, beside the server's way."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

import torch
from tinker import types
from tinker.lib.public_interfaces.custom_loss import (
    LossHandle,
    encode_graph,
    run_loss_handle,
    trace_loss,
)
from torch import Tensor

from backends.contract import CustomLoss, CustomLossInput, CustomLossNode
from backends.losses.graph import custom_loss

LossFn = Callable[..., tuple[Tensor, Mapping[str, Tensor]]]


def uploaded(handle: LossHandle) -> CustomLoss:
    """The graph after its way over the wire."""
    graph = json.loads(encode_graph(handle).model_dump_json())
    return CustomLoss(
        name=handle.name,
        inputs=tuple(CustomLossInput(name=one.name, rank=one.rank) for one in handle.inputs),
        nodes=tuple(CustomLossNode(**node) for node in graph["nodes"]),
    )


def traced(fn: LossFn, ranks: Mapping[str, Any]) -> LossHandle:
    return trace_loss(fn, ranks, "session")


def client_side(
    handle: LossHandle, logprobs: list[Tensor], inputs: list[dict[str, Tensor]]
) -> tuple[float, dict[str, float], list[Tensor]]:
    """Loss, metrics and gradients as the SDK computes them."""
    leaves = [tensor.clone().requires_grad_() for tensor in logprobs]
    data = [
        types.Datum(
            model_input=types.ModelInput.from_ints([0]),
            loss_fn_inputs={
                name: types.TensorData.from_torch(value) for name, value in one.items()
            },
        )
        for one in inputs
    ]
    total, metrics = run_loss_handle(handle, data, leaves)
    total.backward()
    return total.item(), metrics, [leaf.grad for leaf in leaves if leaf.grad is not None]


def server_side(
    loss: CustomLoss, logprobs: list[Tensor], inputs: list[dict[str, Tensor]]
) -> tuple[float, dict[str, float], list[Tensor]]:
    run = custom_loss(loss, len(logprobs))
    total, gradients = 0.0, []
    collected: dict[str, list[float]] = {}
    for tensor, one in zip(logprobs, inputs, strict=True):
        leaf = tensor.clone().requires_grad_()
        wire = {
            name: value.reshape(-1) if value.ndim == 0 else value for name, value in one.items()
        }
        value, metrics = run.compute(leaf, wire, {})
        gradients += torch.autograd.grad(value, [leaf])
        total += value.item()
        for name, metric in metrics.items():
            collected.setdefault(name, []).append(metric.item())
    reduced = {
        name: sum(values) / (len(values) if name.endswith(":mean") else 1)
        for name, values in collected.items()
    }
    return total, reduced, gradients
