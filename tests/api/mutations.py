"""Bodies that are almost right, and some that are not at all."""

from __future__ import annotations

import json
from typing import Any

from hypothesis import strategies as st

ODD = [
    None,
    True,
    -1,
    0,
    2**31,
    2**63,
    10**400,
    -(10**30),
    1.5,
    1e308,
    float("nan"),
    float("inf"),
    "",
    "x" * 3000,
    "\0",
    "a/../b",
    "tinker://run/weights/name",
    "ünïcödé\u2028",
    "\ud800",
    [],
    {},
    [[[[]]]],
    {"a": {"b": [None, {"c": 1}]}},
    [0] * 200,
]


def places(body: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Every place in a body, its own first."""
    found = [path]
    match body:
        case dict():
            items: Any = body.items()
        case list():
            items = enumerate(body)
        case _:
            items = ()
    for key, part in items:
        found += places(part, (*path, key))
    return found


def changed(body: Any, path: tuple[Any, ...], value: Any, remove: bool) -> Any:
    if not path:
        return value
    head, *rest = path
    copy = dict(body) if isinstance(body, dict) else list(body)
    if not rest and remove:
        del copy[head]
    else:
        copy[head] = changed(copy[head], tuple(rest), value, remove)
    return copy


@st.composite
def mutated(draw: st.DrawFn, body: dict[str, Any]) -> bytes:
    """The body with one or two parts replaced or removed; sometimes cut short or other bytes."""
    for _ in range(draw(st.integers(1, 2))):
        path = draw(st.sampled_from(places(body)))
        odd = draw(st.sampled_from(ODD) | st.text(max_size=20) | st.integers())
        body = changed(body, path, odd, remove=draw(st.booleans()))
        if not isinstance(body, dict):
            break
    text = json.dumps(body).encode()
    match draw(st.integers(0, 19)):
        case 0:
            return text[: draw(st.integers(0, len(text)))]
        case 1:
            return draw(st.binary(max_size=60))
        case _:
            return text
