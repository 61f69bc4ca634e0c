"""Weights replaced under requests that are being generated."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from transformers import DynamicCache

from backends.contract import SampleResult
from backends.lora.peft_folder import AdapterFolderError
from backends.sampling.embedded import EmbeddedEngine
from tests.unit.sampling.material import (
    MakeEngine,
    greedy,
    logprobs,
    outcomes,
    prompt,
    reference,
    request,
    result,
)

LONG = 24


def finished(engine: EmbeddedEngine) -> dict[str, SampleResult]:
    return {k: v for k, v in outcomes(engine).items() if isinstance(v, SampleResult)}


def test_the_next_token_is_of_the_new_weights_over_what_the_old_ones_have_read(
    make_engine: MakeEngine, base_path, adapters
):
    old, new = adapters
    engine, tokens = make_engine(), prompt(9)
    engine.add(request("long", tokens, adapter=old, max_tokens=LONG))
    engine.add(request("other", tokens, adapter=new, max_tokens=LONG))
    engine.add(request("base", tokens, max_tokens=LONG))
    for _ in range(6):
        engine.step()
    engine.update(old, new)
    found = finished(engine)

    got = found["long"].sequences[0].tokens.tolist()
    past = greedy(reference(base_path, old), tokens, 6)
    assert got[:6] == past
    assert got[6:] == continued(base_path, old, new, tokens, past, LONG - 6)
    for name, adapter in (("other", new), ("base", None)):
        expected = greedy(reference(base_path, adapter), tokens, LONG)
        assert found[name].sequences[0].tokens.tolist() == expected


@torch.no_grad()
def continued(base_path, old, new, tokens, past, count) -> list[int]:
    """What transformers and peft generate: keys and values of all but the last token by the old
    weights, what follows by the new ones."""
    read = torch.from_numpy(np.concatenate([tokens, past]))[None]
    cache = DynamicCache()
    reference(base_path, old)(input_ids=read[:, :-1], cache=cache, use_cache=True)
    model, last, found = reference(base_path, new), read[:, -1:], []
    for _ in range(count):
        out = model(input_ids=last, cache=cache, use_cache=True)
        last = out.logits[:, -1:].argmax(-1)
        found.append(int(last))
    return found


def test_a_request_that_was_not_begun_has_nothing_of_the_old_weights(
    make_engine: MakeEngine, base_path, adapters
):
    old, new = adapters
    engine, tokens = make_engine(max_batch_size=1), prompt(30)
    assert result(engine, request("before", tokens, adapter=old, max_tokens=1))
    engine.add(request("busy", prompt(5), max_tokens=4))
    engine.step()
    waits = request("waits", tokens, adapter=old, max_tokens=8, prompt_logprobs=True)
    engine.add(waits)
    engine.update(old, new)
    found = finished(engine)["waits"]
    model = reference(base_path, new)
    assert found.prompt_cache_hit_tokens == 0
    assert found.sequences[0].tokens.tolist() == greedy(model, tokens, 8)
    rows = logprobs(model, tokens)
    expected = rows[:-1].gather(1, torch.from_numpy(tokens[1:])[:, None])[:, 0]
    assert found.prompt_logprobs is not None
    np.testing.assert_allclose(found.prompt_logprobs[1:], expected.numpy(), atol=1e-4)


def test_those_that_begin_with_the_new_weights_share_no_prefix_with_the_old(
    make_engine: MakeEngine, adapters
):
    old, new = adapters
    engine, tokens = make_engine(), prompt(30)
    engine.add(request("long", tokens, adapter=old, max_tokens=LONG))
    engine.step()
    engine.step()
    engine.update(old, new)
    engine.add(request("first", tokens, adapter=new, max_tokens=1))
    assert finished(engine)["first"].prompt_cache_hit_tokens == 0
    assert result(engine, request("then", tokens, adapter=new)).prompt_cache_hit_tokens == 29


def test_a_folder_without_an_adapter_changes_nothing(
    make_engine: MakeEngine, base_path, adapters, tmp_path
):
    engine, tokens = make_engine(), prompt(9)
    engine.add(request("long", tokens, adapter=adapters[0], max_tokens=LONG))
    engine.step()
    with pytest.raises(AdapterFolderError):
        engine.update(adapters[0], str(tmp_path))
    expected = greedy(reference(base_path, adapters[0]), tokens, LONG)
    assert finished(engine)["long"].sequences[0].tokens.tolist() == expected
