"""Why something is not on the list, where there is more to say than that."""

from __future__ import annotations

_LEAVES_TORCH = frozenset({"item", "numpy", "tolist", "__array__", "__float__", "__int__"})
_GRADIENTS = frozenset({"backward", "register_hook", "requires_grad_", "retain_grad"})
_UNWRITTEN = frozenset({"empty", "empty_like", "new_empty", "empty_strided", "as_strided"})
_RANDOM = ("rand", "bernoulli", "multinomial", "normal", "dropout", "poisson", "exponential")


def why_not(op: str, target: str) -> str:
    """One clause that follows the node's name."""
    last = target.rsplit(".", 1)[-1]
    what = f"calls {target[:80]!r}"
    if last in _LEAVES_TORCH:
        return f"{what}, which leaves torch; keep every value a tensor"
    if last in _GRADIENTS:
        return f"{what}; the server runs the backward pass"
    if last in _UNWRITTEN:
        return f"{what}, which reads memory that was not written; use zeros"
    if last.lstrip("_").startswith(_RANDOM):
        return f"{what}, which is random; a loss must give the same twice"
    if last.endswith("_") and not last.endswith("__") and op == "call_method":
        return f"{what}, which changes its tensor in place; use {last.rstrip('_')!r}"
    return f"{what}, which is not on the list of what a custom loss may call"
