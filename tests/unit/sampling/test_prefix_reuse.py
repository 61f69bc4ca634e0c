from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from backends.sampling.embedded import EmbeddedEngine
from backends.sampling.prefix_cache import CacheKey, PrefixCache, common_prefix
from tests.unit.sampling.material import (
    MakeEngine,
    greedy,
    outcomes,
    prompt,
    reference,
    request,
    result,
)


def hits(engine: EmbeddedEngine, tokens: np.ndarray, **fields: object) -> int:
    return result(engine, request("r", tokens, **fields)).prompt_cache_hit_tokens


def read_tokens(engine: EmbeddedEngine) -> list[int]:
    """Grows by the number of tokens of every pass through the model."""
    counts: list[int] = []
    hidden = engine._model.hidden

    def counted(tokens, *rest):
        counts.append(len(tokens))
        return hidden(tokens, *rest)

    engine._model = type("Counted", (), {"__getattr__": lambda _, name: getattr(model, name)})()
    model = hidden.__self__
    engine._model.hidden = counted
    return counts


def test_a_prompt_read_before_is_not_read_again(make_engine: MakeEngine):
    engine = make_engine()
    counts = read_tokens(engine)
    tokens = prompt(40)
    assert hits(engine, tokens, max_tokens=1) == 0
    assert sum(counts) == 40
    counts.clear()
    assert hits(engine, tokens, max_tokens=1) == 39
    assert sum(counts) == 1


def test_the_longest_common_prefix_is_reused(make_engine: MakeEngine, base_path):
    engine = make_engine()
    short, long = prompt(20), np.concatenate([prompt(20), prompt(30, seed=1)])
    other = np.concatenate([long[:33], prompt(9, seed=2)])
    for tokens, expected in ((short, 0), (long, 20), (other, 33), (long[:25], 24)):
        got = result(engine, request("r", tokens, max_tokens=30))
        assert got.prompt_cache_hit_tokens == expected
        model = reference(base_path, None)
        assert got.sequences[0].tokens.tolist() == greedy(model, tokens, 30)


def test_nothing_is_shared_across_adapters_or_namespaces(make_engine, base_path, adapters):
    engine = make_engine()
    tokens = prompt(40)
    places = [(a, n) for a in (None, *adapters) for n in ("", "tenant-a", "tenant-b")]
    for adapter, namespace in places:
        fields = {"adapter": adapter, "cache_namespace": namespace, "max_tokens": 20}
        first = result(engine, request("r", tokens, **fields))
        assert first.prompt_cache_hit_tokens == 0
        expected = greedy(reference(base_path, adapter), tokens, 20)
        assert first.sequences[0].tokens.tolist() == expected
        second = result(engine, request("r", tokens, **fields))
        assert second.prompt_cache_hit_tokens == 39
        assert second.sequences[0].tokens.tolist() == expected


def test_the_next_turn_finds_the_whole_of_the_last_one(make_engine: MakeEngine, base_path):
    engine = make_engine()
    tokens = prompt(20)
    answer = result(engine, request("r", tokens, max_tokens=15)).sequences[0].tokens
    turn = np.concatenate([tokens, answer.astype(np.int64), prompt(5, seed=9)])
    got = result(engine, request("r", turn, max_tokens=15))
    assert got.prompt_cache_hit_tokens == 34  # the last token was drawn, but never read
    assert got.sequences[0].tokens.tolist() == greedy(reference(base_path, None), turn, 15)


def test_a_group_that_arrives_together_reads_its_prompt_once(make_engine: MakeEngine):
    engine = make_engine(prefill_chunk_tokens=64)
    counts = read_tokens(engine)
    tokens = prompt(50)
    group = [request(str(i), tokens, max_tokens=1) for i in range(6)]
    found = outcomes(engine, *group)
    assert sorted(r.prompt_cache_hit_tokens for r in found.values()) == [0, 49, 49, 49, 49, 49]
    assert sum(counts) == 50 + 5


def test_a_group_whose_first_is_cancelled_goes_on(make_engine: MakeEngine):
    engine = make_engine(prefill_chunk_tokens=8)
    tokens = prompt(50)
    for name in ("first", "second"):
        engine.add(request(name, tokens))
    engine.step()
    engine.cancel("first")
    found = outcomes(engine)
    assert found["second"].prompt_cache_hit_tokens == 0


def test_the_oldest_prompts_make_room(make_engine: MakeEngine):
    engine = make_engine(kv_token_budget=100)
    for seed in (0, 1):
        hits(engine, prompt(40, seed), max_tokens=1)
    assert hits(engine, prompt(20, 0), max_tokens=1) == 19
    hits(engine, prompt(40, 2), max_tokens=1)
    assert hits(engine, prompt(20, 0), max_tokens=1) == 19
    assert hits(engine, prompt(20, 1), max_tokens=1) == 0


@given(st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=6), min_size=1, max_size=12))
def test_the_longest_prefix_is_found_among_any_entries(texts: list[list[int]]):
    cache, key = PrefixCache(10_000), CacheKey(None, "")
    *known, probe = [np.array(text) for text in texts]
    for tokens in known:
        assert cache.reserve(len(tokens))
        entry = cache.open(key, tokens)
        cache.publish(entry)
        cache.unpin(entry)
    expected = max((common_prefix(tokens, probe) for tokens in known), default=0)
    entry, length = cache.longest(key, probe, 10)
    assert length == expected
    assert (entry is None) == (length == 0)
    assert cache.longest(CacheKey("other", ""), probe, 10) == (None, 0)
    assert cache.reserve(10_000)
    assert cache.longest(key, probe, 10) == (None, 0)
