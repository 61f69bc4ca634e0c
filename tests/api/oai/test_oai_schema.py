"""Whatever the OpenAPI schema of this surface allows, or nearly, gets a good answer."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.api.described import bounded, call, cases, documents, naming, operations, sentence
from tests.api.oai.client import MODEL, Oai

OPERATIONS = operations(documents()[1])


@pytest.mark.parametrize("route", OPERATIONS)
@bounded
@given(draw=st.data())
async def test_whatever_the_schema_allows_or_nearly_is_answered(
    oai: Oai, route: str, draw: st.DataObject
) -> None:
    case = draw.draw(cases(OPERATIONS[route]))
    if draw.draw(st.booleans()):
        case = naming(case, {"model": MODEL, "name": MODEL})
    sentence(await call(oai.http, case, prefix="/oai"), "error", "message")
