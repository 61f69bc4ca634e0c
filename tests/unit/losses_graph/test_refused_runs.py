"""What a graph does is counted before it is done: sizes, work, numbers, and what comes out."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from backends.contract import CustomLossNode
from backends.losses.base import LossRefusedError
from backends.losses.graph import custom_loss, refusal
from tests.unit.losses_graph.graphs import SUM, X, call, graph, method, ref, tup


def shape(name: str = "n") -> list[CustomLossNode]:
    """Node `n` is the number of logprobs, 4."""
    return [call("shape", "getattr", X, "shape"), call(name, "operator.getitem", ref("shape"), 0)]


def squared(times: int) -> list[CustomLossNode]:
    steps, last = [], "n"
    for index in range(times):
        steps.append(call(f"p{index}", "operator.pow", ref(last), 16))
        last = f"p{index}"
    return steps


def doubled(times: int) -> list[CustomLossNode]:
    steps, last = [], "x"
    for index in range(times):
        steps.append(method(f"r{index}", "repeat", ref(last), 4))
        last = f"r{index}"
    return steps


def nested(times: int) -> list[CustomLossNode]:
    steps, last = [], "shape"
    for index in range(times):
        inner = {"ref": last}
        steps.append(call(f"t{index}", "operator.getitem", [[inner] * 100], 0))
        last = f"t{index}"
    return steps


def wide(name: str, size: int) -> list[CustomLossNode]:
    """A batch of vectors for a product that repeats both sides."""
    return [
        call(f"{name}o", "torch.ones", size, 1000),
        call(name, "operator.getitem", ref(f"{name}o"), _WIDE[name]),
    ]


_ALL = {"slice": [None, None, None]}
_WIDE = {"a": tup(_ALL, None, None, _ALL), "b": tup(None, _ALL, _ALL, None)}

AT_RUN_TIME: dict[str, tuple[list[CustomLossNode], str]] = {
    "zeros": ([call("bad", "torch.zeros", 10**6, 10**6)], "bad"),
    "overflowing_zeros": ([call("bad", "torch.zeros", 2**32, 2**32)], "bad"),
    "arange": ([call("bad", "torch.arange", 10**12)], "bad"),
    "small_steps": ([call("bad", "torch.arange", 0, 1, 1e-300)], "bad"),
    "eye": ([call("bad", "torch.eye", 10**6)], "bad"),
    "linspace": ([call("bad", "torch.linspace", 0, 1, 10**12)], "bad"),
    "new_zeros": ([method("bad", "new_zeros", X, [10**9, 4])], "bad"),
    "expand": ([method("bad", "expand", X, 10**9, 4)], "bad"),
    "overflowing_expand": ([method("bad", "expand", X, 2**40, 2**40, 4)], "bad"),
    "repeat": ([method("bad", "repeat", X, 10**9)], "bad"),
    "loop_of_repeats": (doubled(20), "r9"),
    "interleave": ([call("bad", "torch.repeat_interleave", X, 10**9)], "bad"),
    "pad": ([call("bad", "torch.nn.functional.pad", X, tup(0, 10**10))], "bad"),
    "diag": ([call("bad", "torch.diag_embed", X, 10**9)], "bad"),
    "outer": (
        [call("a", "torch.zeros", 10**6), call("bad", "torch.outer", ref("a"), ref("a"))],
        "bad",
    ),
    "einsum": (
        [call("a", "torch.zeros", 10**6), call("bad", "torch.einsum", "i,j->ij", *[ref("a")] * 2)],
        "bad",
    ),
    "three_operands": ([call("bad", "torch.einsum", "i,i,i->i", X, X, X)], "bad"),
    "product": (
        [call("a", "torch.zeros", 1200, 1200), call("bad", "torch.matmul", ref("a"), ref("a"))],
        "bad",
    ),
    "repeated_product": (
        [*wide("a", 500), *wide("b", 500), call("bad", "torch.matmul", ref("a"), ref("b"))],
        "bad",
    ),
    "broadcast": (
        [
            call("a", "torch.ones", 10**5, 1),
            call("b", "torch.ones", 1, 10**5),
            call("bad", "operator.add", ref("a"), ref("b")),
        ],
        "bad",
    ),
    "one_hot": (
        [
            method("i", "new_zeros", X, [4], dtype={"dtype": "int64"}),
            call("bad", "torch.nn.functional.one_hot", ref("i"), 10**10),
        ],
        "bad",
    ),
    "pieces": (
        [call("a", "torch.zeros", 10**6), call("bad", "torch.split", ref("a"), 1)],
        "bad",
    ),
    "sections": ([call("bad", "torch.tensor_split", X, 10**9)], "bad"),
    "unbind": ([call("a", "torch.zeros", 10**6), call("bad", "torch.unbind", ref("a"))], "bad"),
    "dimensions": ([method("bad", "reshape", X, [1] * 40 + [4])], "bad"),
    "power": ([*shape(), *squared(4)], "p1"),
    "power_of_constants": ([call("bad", "operator.pow", 10, 10**10)], "bad"),
    "shift": ([*shape(), call("bad", "operator.lshift", ref("n"), 10**9)], "bad"),
    "product_of_integers": ([call("bad", "operator.mul", 2**62, 2**62)], "bad"),
    "text": ([call("bad", "operator.mul", "a", 10**9)], "bad"),
    "format": ([call("bad", "operator.mod", "%1000000000d", 1)], "bad"),
    "format_of_a_tensor": ([call("bad", "operator.mod", "%s", X)], "bad"),
    "list": ([call("bad", "operator.mul", [1, 2], 10**9)], "bad"),
    "list_by_tensor": (
        [
            call("big", "torch.full", [], 10**9, dtype={"dtype": "int64"}),
            call("bad", "operator.mul", [0], ref("big")),
        ],
        "bad",
    ),
    "lists_in_lists": ([*shape(), *nested(9)], "t0"),
    "exp_overflow": ([call("bad", "math.exp", 1000.0)], "bad"),
    "tensor_to_math": ([call("bad", "math.exp", X)], "bad"),
    "division": ([call("bad", "operator.truediv", 1, 0)], "bad"),
    "complex": ([call("bad", "operator.pow", -1, 0.5)], "bad"),
    "wrong_type": ([call("bad", "torch.exp", "text")], "bad"),
    "no_argument": ([call("bad", "torch.exp")], "bad"),
    "wrong_shape": ([method("bad", "view", X, 3)], "bad"),
    "bad_index": ([call("bad", "operator.getitem", X, 99)], "bad"),
    "index_by_text": ([call("bad", "operator.getitem", X, "__class__")], "bad"),
    "attribute_of_a_number": ([*shape(), call("bad", "getattr", ref("n"), "shape")], "bad"),
    "values_of_a_tensor": ([call("bad", "getattr", X, "values")], "bad"),
    "svd_by_norm": (
        [
            method("m", "reshape", X, 2, 2),
            call("bad", "torch.norm", ref("m"), "nuc"),
        ],
        "bad",
    ),
    "not_scalar": ([method("loss", "exp", X)], "loss"),
    "not_connected": ([method("d", "detach", X), method("loss", "sum", ref("d"))], "loss"),
    "not_a_tensor": ([method("loss", "numel", X)], "loss"),
    "infinite": (
        [method("z", "mul", X, {"float": "inf"}), method("loss", "sum", ref("z"))],
        "loss",
    ),
    "nan": ([method("z", "mul", X, {"float": "nan"}), method("loss", "sum", ref("z"))], "loss"),
}


def computed(custom: Any, logprobs: torch.Tensor | None = None) -> Any:
    leaf = torch.full((4,), -1.0) if logprobs is None else logprobs
    return custom_loss(custom, 1).compute(leaf.requires_grad_(), {}, {})


@pytest.mark.parametrize("what", AT_RUN_TIME)
def test_what_grows_or_does_not_fit_is_refused_when_it_runs(what: str) -> None:
    steps, name = AT_RUN_TIME[what]
    ends = steps[-1].name == "loss"
    custom = graph(*steps) if ends else graph(*steps, SUM)
    assert refusal(custom) is None
    with pytest.raises(LossRefusedError, match=f"node '{name}'"):
        computed(custom)


def test_an_infinite_gradient_is_refused() -> None:
    steps = (method("s", "sqrt", X), method("loss", "sum", ref("s")))
    with pytest.raises(LossRefusedError, match="gradient of the loss is not finite"):
        computed(graph(*steps), torch.zeros(4))


def test_a_metric_must_be_one_number() -> None:
    metrics = {"custom/all:sum": X}
    with pytest.raises(LossRefusedError, match="custom/all:sum"):
        computed(graph(SUM, metrics=metrics))


def test_the_same_graph_gives_the_same_refusal_in_a_large_request() -> None:
    """Datums share what a request may compute; a small one is never short of it."""
    custom = graph(*(call(f"n{i}", "torch.exp", X) for i in range(200)), SUM)
    loss, _ = custom_loss(custom, 2_000).compute(torch.zeros(4, requires_grad=True), {}, {})
    assert loss.item() == 0


def test_a_device_is_taken_and_means_the_cpu() -> None:
    to = method("moved", "to", X, {"device": "cuda:0"})
    assert computed(graph(to, method("loss", "sum", ref("moved"))))[0].item() == -4
