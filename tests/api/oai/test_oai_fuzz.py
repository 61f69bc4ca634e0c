"""Whatever is sent: an answer, or an error that says what is wrong."""

from __future__ import annotations

import json
from typing import Any

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.api.oai.client import MODEL, Oai

LEAVES = (
    st.none()
    | st.booleans()
    | st.integers(-(2**70), 2**70)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=6)
    | st.sampled_from(["user", "system", "text", MODEL, "tinker://a/sampler_weights/b"])
)
NAMES = st.sampled_from(["role", "content", "type", "text", "include_usage", "x", "tool_calls"])
VALUES = st.recursive(
    LEAVES,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(NAMES, inner, max_size=3),
    max_leaves=8,
)
FIELDS = [
    "model",
    "messages",
    "prompt",
    "max_tokens",
    "max_completion_tokens",
    "temperature",
    "top_p",
    "top_k",
    "n",
    "seed",
    "stop",
    "stream",
    "stream_options",
    "logprobs",
    "top_logprobs",
    "echo",
    "best_of",
    "suffix",
    "tools",
    "chat_template_kwargs",
]
BODIES = st.dictionaries(st.sampled_from(FIELDS), VALUES, max_size=4)
GOOD = {"model": MODEL, "messages": [{"role": "user", "content": "Hi"}], "prompt": "Hi"}

often = settings(
    max_examples=150,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)


@often
@given(body=BODIES, path=st.sampled_from(["chat/completions", "completions"]))
async def test_no_body_breaks_it(oai: Oai, body: dict[str, Any], path: str) -> None:
    response = await oai.http.post(path, content=json.dumps({**GOOD, **body}).encode())
    assert response.status_code in (200, 400, 404, 429), response.text
    if response.status_code != 200:
        error = response.json()["error"]
        assert error["message"]
        assert len(error["message"]) < 1000
