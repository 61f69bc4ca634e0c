"""Whatever the nodes are, the interpreter answers with its own refusal, soon, in little memory."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch._refs  # as in the worker: the first to need it would be timed with it
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from backends.contract import CustomLoss, CustomLossNode
from backends.losses.base import LossRefusedError
from backends.losses.graph import custom_loss
from backends.losses.graph.tables import FUNCTIONS, METHODS
from tests.unit.losses_graph.graphs import graph, node, ref

MOST_S = 1.0
MOST_BYTES = 100 * 2**20

numbers = st.one_of(
    st.integers(-3, 6),
    st.sampled_from([0, 1, 1.0, 0.5, -1.0, 2**20, 2**31, 2**62, 10**9, 10**40, -(2**63)]),
    st.floats(allow_nan=True, allow_infinity=True),
    st.booleans(),
)
words = st.sampled_from(
    ["sum", "mean", "none", "shape", "values", "__class__", "T", "i,i->", "fro"]
)
refs = st.sampled_from(["x", "w", "s", *(f"n{i}" for i in range(8))]).map(ref)
scalars = st.one_of(numbers, words, st.none(), refs, refs, refs)
kinds = st.sampled_from(
    [
        {"dtype": "int64"},
        {"dtype": "float32"},
        {"dtype": "bool"},
        {"float": "inf"},
        {"float": "nan"},
        {"ellipsis": True},
        {"device": "cuda"},
        {"layout": "strided"},
        {"dict": {}},
        {},
    ]
)
values = st.recursive(
    st.one_of(scalars, scalars, kinds),
    lambda inner: st.one_of(
        st.lists(inner, max_size=4),
        st.lists(inner, max_size=4).map(lambda items: {"tuple": items}),
        st.lists(inner, min_size=3, max_size=3).map(lambda items: {"slice": items}),
    ),
    max_leaves=6,
)
keywords = st.dictionaries(
    st.sampled_from(["dim", "keepdim", "dtype", "device", "out", "reduction", "p", "min", "max"]),
    values,
    max_size=2,
)


@st.composite
def calls(draw: Callable[..., Any]) -> CustomLossNode:
    """Mostly of what is allowed, with the first argument mostly a tensor."""
    op, table = draw(st.sampled_from([("call_function", FUNCTIONS), ("call_method", METHODS)]))
    target = draw(st.one_of(st.sampled_from(sorted(table)), st.text(max_size=8)))
    args = [draw(st.one_of(refs, refs, values)), *draw(st.lists(values, max_size=3))]
    return node(op, "", target, *args, **draw(keywords))


def numbered(steps: list[CustomLossNode], last: str) -> CustomLoss:
    named = [
        CustomLossNode(op=s.op, name=f"n{i}", target=s.target, args=s.args, kwargs=s.kwargs)
        for i, s in enumerate(steps)
    ]
    inputs = (("logprobs", 1), ("w", 2), ("s", 0))
    return graph(*named, loss=last, inputs=inputs, metrics={"custom/m:mean": ref("x")})


_RESET = Path("/proc/self/clear_refs")
"""Linux alone: writing 5 here forgets the peak of the memory so far."""


def peak_bytes() -> int:
    """The most memory this process has had at once; 0 where that cannot be asked."""
    if not _RESET.exists():
        return 0
    status = Path("/proc/self/status").read_text()
    [line] = [line for line in status.splitlines() if line.startswith("VmHWM")]
    return int(line.split()[1]) * 1024


def attempt(custom: CustomLoss) -> None:
    if _RESET.exists():
        _RESET.write_text("5")
    before, began = peak_bytes(), time.perf_counter()
    try:
        loss = custom_loss(custom, 1)
        inputs = {"w": torch.rand(4, 3), "s": torch.tensor([0.5])}
        loss.compute(torch.full((4,), -1.0, requires_grad=True), inputs, {})
    except LossRefusedError:
        pass
    assert time.perf_counter() - began < MOST_S
    assert peak_bytes() - before < MOST_BYTES


@settings(max_examples=600, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.lists(calls(), min_size=1, max_size=8), st.integers(0, 7))
def test_any_list_of_nodes_is_computed_or_refused(steps: list[CustomLossNode], last: int) -> None:
    attempt(numbered(steps, f"n{min(last, len(steps) - 1)}"))


json_values = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=5)),
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(st.text(), inner)),
    max_leaves=10,
)
raw_nodes = st.builds(
    CustomLossNode,
    op=st.one_of(st.sampled_from(["placeholder", "call_function", "output"]), st.text(max_size=5)),
    name=st.text(max_size=3),
    target=st.one_of(st.sampled_from(["logprobs", "torch.exp", "getattr"]), st.text(max_size=5)),
    args=st.lists(json_values, max_size=3),
    kwargs=st.dictionaries(st.text(max_size=4), json_values, max_size=2),
)


@settings(max_examples=300, deadline=None)
@given(st.lists(raw_nodes, max_size=5))
def test_any_json_is_refused_in_words(nodes: list[CustomLossNode]) -> None:
    attempt(CustomLoss(name="f", inputs=graph().inputs, nodes=tuple(nodes)))
