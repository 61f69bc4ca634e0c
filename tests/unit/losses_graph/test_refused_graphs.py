"""A graph that asks for anything but arithmetic is refused, by the node's name."""

from __future__ import annotations

from typing import Any

import pytest

from backends.contract import CustomLossNode
from backends.losses.graph import refusal
from tests.unit.losses_graph.graphs import SUM, X, call, graph, method, node, ref, tup

AT_CREATION: dict[str, CustomLossNode] = {
    "dunder_attribute": call("bad", "getattr", X, "__class__"),
    "globals": call("bad", "getattr", X, "__globals__"),
    "storage": call("bad", "getattr", X, "data"),
    "gradient": call("bad", "getattr", X, "grad_fn"),
    "attribute_by_node": call("bad", "getattr", X, X),
    "attribute_with_default": call("bad", "getattr", X, "shape", 0),
    "eval": call("bad", "eval", "1"),
    "builtins_eval": call("bad", "builtins.eval", "1"),
    "import": call("bad", "builtins.__import__", "os"),
    "open": call("bad", "open", "/etc/passwd"),
    "os": call("bad", "os.system", "true"),
    "load": call("bad", "torch.load", "/etc/passwd"),
    "save": call("bad", "torch.save", X, "/tmp/x"),
    "ops": call("bad", "torch.ops.aten.exp.default", X),
    "hub": call("bad", "torch.hub.load", "a", "b"),
    "compile": call("bad", "torch.compile", X),
    "dotted": call("bad", "torch.nn.functional.torch.load", "x"),
    "private": call("bad", "torch._C._set_grad_enabled", False),
    "attrgetter": call("bad", "operator.attrgetter", "__class__"),
    "methodcaller": call("bad", "operator.methodcaller", "backward"),
    "setitem": call("bad", "operator.setitem", X, 0, 1.0),
    "factorial": call("bad", "math.factorial", 10**6),
    "empty": call("bad", "torch.empty_like", X),
    "random": call("bad", "torch.rand_like", X),
    "dropout": call("bad", "torch.nn.functional.dropout", X),
    "in_place": method("bad", "mul_", X, 2),
    "in_place_keyword": call("bad", "torch.nn.functional.relu", X, inplace=True),
    "in_place_argument": call("bad", "torch.nn.functional.relu", X, True),
    "out": call("bad", "torch.exp", X, out=X),
    "out_argument": call("bad", "torch.norm", X, 2, 0, False, X),
    "backward": method("bad", "backward", X),
    "hook": method("bad", "register_hook", X, "x"),
    "numpy": method("bad", "numpy", X),
    "pointer": method("bad", "data_ptr", X),
    "untyped_storage": method("bad", "untyped_storage", X),
    "as_strided": method("bad", "as_strided", X, [9], [1]),
    "reduce": method("bad", "__reduce_ex__", X, 2),
    "method_of_text": method("bad", "format", "{0.__class__}", X),
    "get_attr": node("get_attr", "bad", "_tensor_constant0"),
    "call_module": node("call_module", "bad", "lin", X),
    "late_placeholder": node("placeholder", "bad", "weights"),
    "unknown_op": node("exec", "bad", "print"),
    "itself": call("bad", "torch.exp", ref("bad")),
    "later": call("bad", "torch.exp", ref("loss")),
    "unknown_node": call("bad", "torch.exp", ref("nowhere")),
    "node_by_number": call("bad", "torch.exp", {"ref": 3}),
    "unknown_object": call("bad", "torch.exp", {"eval": "1"}),
    "two_keys": call("bad", "torch.exp", {"ref": "x", "tuple": []}),
    "dict_argument": call("bad", "torch.exp", {"dict": {"a": 1}}),
    "bad_dtype": method("bad", "to", X, {"dtype": "complex64"}),
    "bad_device": method("bad", "to", X, {"device": "/dev/mem"}),
    "sparse_layout": call("bad", "torch.zeros_like", X, layout={"layout": "sparse_coo"}),
    "bad_float": call("bad", "torch.add", X, {"float": "1e5"}),
    "long_text": call("bad", "torch.einsum", "i" * 10_000, X),
    "huge_integer": call("bad", "torch.add", X, 10**40),
    "many_items": call("bad", "torch.cat", [X] * 10_000),
    "many_nested_items": call("bad", "torch.cat", [[X] * 100] * 100),
    "unknown_keyword": call("bad", "torch.exp", X, __class__=1),
    "not_data": call("bad", "torch.exp", object()),
}


@pytest.mark.parametrize("what", AT_CREATION)
def test_what_is_not_on_the_list_is_refused_before_it_runs(what: str) -> None:
    why = refusal(graph(AT_CREATION[what], SUM))
    assert why is not None
    assert "'bad'" in why


def deep(levels: int) -> Any:
    value: Any = X
    for _ in range(levels):
        value = [value]
    return value


@pytest.mark.parametrize(
    ("bad", "words"),
    [
        (graph(call("bad", "torch.cat", deep(500)), SUM), ["'bad'", "deeper"]),
        (graph(*(call(f"n{i}", "torch.exp", X) for i in range(5_000)), SUM), ["5003 nodes"]),
        (graph(method("x", "sum", X), SUM), ["'x'", "name of its own"]),
        (graph(method("loss", "exp", X), SUM), ["'loss'", "name of its own"]),
        (graph(method("", "exp", X), SUM), ["name of its own"]),
        (graph(SUM, inputs=(("weights", 1),)), ["logprobs"]),
        (graph(SUM, inputs=(("logprobs", 0),)), ["rank 1 or 2"]),
        (graph(SUM, inputs=(("logprobs", 1), ("w", 3))), ["rank 3"]),
        (graph(SUM, inputs=(("logprobs", 1), ("W!", 1))), ["W!"]),
        (graph(SUM, inputs=(("logprobs", 1), ("w", 1), ("w", 1))), ["'w'"]),
        (graph(SUM, inputs=(("logprobs", 1), *((f"i{n}", 1) for n in range(16)))), ["17 inputs"]),
        (graph(), ["'output'", "'loss'"]),
        (graph(SUM, metrics={"loss:sum": ref("loss")}), ["loss:sum", "custom/<name>"]),
        (graph(SUM, metrics={"custom/a:max": ref("loss")}), ["custom/a:max"]),
        (graph(SUM, metrics={"custom/a:sum": 1.0}), ["'output'", "nodes"]),
        (graph(SUM, metrics={f"custom/{i}:sum": ref("loss") for i in range(99)}), ["64"]),
        (graph(SUM, output=node("output", "end", "output", ref("loss"))), ["'end'", "metrics"]),
        (graph(SUM, output=node("output", "end", "output", tup(1.0, {"dict": {}}))), ["'end'"]),
        (graph(SUM, output=SUM), ["'loss'", "name of its own"]),
        (graph(SUM, output=method("end", "exp", X)), ["'end'", "output"]),
    ],
)
def test_a_graph_that_is_no_loss_is_refused(bad: Any, words: list[str]) -> None:
    why = refusal(bad)
    assert why is not None
    for word in words:
        assert word in why
