from __future__ import annotations

from enum import StrEnum

import pytest
from pydantic import Field

from server.core.errors import BadInput
from server.wire.json_shapes import WireModel, parse_json


class Colour(StrEnum):
    RED = "red"


class Inner(WireModel):
    size: int = 7


class Body(WireModel):
    name: str
    colour: Colour = Colour.RED
    inner: Inner = Inner()
    ratio: float = 0.5
    many: list[int] = Field(default_factory=list)


def test_null_and_unknown_fields_are_as_if_absent() -> None:
    body = parse_json(Body, b'{"name": "a", "inner": {"size": null}, "ratio": null, "new": 1}')

    assert body == Body(name="a")


def test_json_has_one_kind_of_number_list_and_text() -> None:
    body = parse_json(Body, b'{"name": "a", "colour": "red", "ratio": 1, "many": [1, 2]}')

    assert body == Body(name="a", ratio=1.0, many=[1, 2])


@pytest.mark.parametrize(
    ("body", "sentence"),
    [
        (b"{}", "name: is missing."),
        (b'{"name": null}', "name: is missing."),
        (b'{"name": 3}', "name: Input should be a valid string, got 3."),
        (b'{"name": "a", "many": [1, "2"]}', "many[1]: Input should be a valid integer, got '2'."),
        (
            b'{"name": "a", "inner": {"size": true}}',
            "inner.size: Input should be a valid integer, got True.",
        ),
        (b"[1]", "The request body: Input should be an object, got [1]."),
    ],
)
def test_what_is_wrong_is_one_sentence_with_the_field(body: bytes, sentence: str) -> None:
    with pytest.raises(BadInput) as refused:
        parse_json(Body, body)
    assert str(refused.value) == sentence
