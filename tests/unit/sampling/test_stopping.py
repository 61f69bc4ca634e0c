from __future__ import annotations

import numpy as np
import pytest

from backends.sampling.stops import StopWatch
from tests.tiny_models import EOS_TOKEN_ID
from tests.unit.sampling.material import MakeEngine, prompt, request, result


class Words:
    """Decodes token i as words[i], bytes joined before they become text."""

    def __init__(self, *words: bytes | str) -> None:
        self.words = [w.encode() if isinstance(w, str) else w for w in words]
        self.longest = 0

    def decode(self, token_ids, *, skip_special_tokens, clean_up_tokenization_spaces):
        assert not skip_special_tokens
        assert not clean_up_tokenization_spaces
        self.longest = max(self.longest, len(token_ids))
        return b"".join(self.words[i] for i in token_ids).decode(errors="replace")


def stops_at(decoder: Words, tokens: list[int], *strings: str) -> int | None:
    """Which token completes one of the strings."""
    watch = StopWatch((), strings, decoder)
    return next((i for i, token in enumerate(tokens) if watch.push(token)), None)


def test_a_stop_string_may_be_part_of_one_token():
    assert stops_at(Words("a", "...", "b"), [0, 1, 2], "..") == 1


def test_a_stop_string_may_span_tokens():
    words = Words("x", "Hu", "man", ": ", "Human")
    assert stops_at(words, [0, 1, 0, 1, 2, 3], "Human:") == 5
    assert stops_at(words, [4, 0, 4, 3], "User:", "Human: ") == 3
    assert stops_at(words, [1, 1, 2, 0], "HuHuman") == 2
    assert stops_at(words, [0] * 9, "Human:") is None


def test_a_character_may_span_tokens():
    euro = "€".encode()
    words = Words("a", euro[:1], euro[1:2], euro[2:], "b")
    assert stops_at(words, [0, 1, 2, 3, 4], "€") == 3
    assert stops_at(words, [0, 1, 2, 3, 4], "€b") == 4
    assert stops_at(words, [4, 0, 1, 2, 3], "ba") == 1


def test_text_beside_an_unfinished_character_counts_already():
    words = Words("stop" + "x", b"stop\xe2", b"\x82\xac")
    assert stops_at(words, [1, 2], "stop") == 0
    assert stops_at(words, [1, 2, 0], "€stop") == 2


def test_bytes_that_are_no_text_do_not_blind_or_slow_the_search():
    words = Words(b"\xff", "end")
    assert stops_at(words, [0] * 300 + [1], "end") == 300
    assert words.longest < 40


def test_a_token_costs_the_same_however_long_the_text_is():
    words = Words("ab ")
    assert stops_at(words, [0] * 2000, "zzz") is None
    assert words.longest <= 2


def test_special_tokens_are_text(make_engine: MakeEngine, tokenizer):
    watch = StopWatch((), ("a<eos>",), tokenizer)
    assert [watch.push(token) for token in (ord("b"), ord("a"), EOS_TOKEN_ID)] == [
        False,
        False,
        True,
    ]


@pytest.fixture
def free_run(make_engine: MakeEngine) -> np.ndarray:
    """What the model says when nothing stops it."""
    fields = {"temperature": 1.0, "seed": 1, "max_tokens": 60}
    return result(make_engine(), request("r", prompt(6), **fields)).sequences[0].tokens


def test_generation_ends_with_the_stop_token_in_it(make_engine: MakeEngine, free_run):
    at = 10
    first = int(np.flatnonzero(free_run == free_run[at])[0])
    fields = {"temperature": 1.0, "seed": 1, "max_tokens": 60}
    stop = (int(free_run[at]), 250)
    got = result(make_engine(), request("r", prompt(6), stop_token_ids=stop, **fields))
    sequence = got.sequences[0]
    assert sequence.stop_reason == "stop"
    assert sequence.tokens.tolist() == free_run[: first + 1].tolist()
    assert len(sequence.logprobs) == first + 1


def test_generation_ends_with_the_token_that_completes_a_stop_string(
    make_engine: MakeEngine, free_run, tokenizer
):
    text = "".join(tokenizer.decode([t]) for t in free_run)
    readable = next(i for i in range(5, 58) if "\ufffd" not in text[i : i + 2])
    stop = text[readable : readable + 2]
    first = text.index(stop)
    fields = {"temperature": 1.0, "seed": 1, "max_tokens": 60}
    sequence = result(
        make_engine(), request("r", prompt(6), stop_strings=("absent", stop), **fields)
    ).sequences[0]
    assert sequence.stop_reason == "stop"
    kept = "".join(tokenizer.decode([t]) for t in sequence.tokens)
    assert kept == text[: first + 2]


def test_without_stops_not_even_the_end_token_ends_it(make_engine: MakeEngine):
    tokens = np.full(3, EOS_TOKEN_ID)
    got = result(make_engine(), request("r", tokens, temperature=5.0, seed=0, max_tokens=500))
    assert EOS_TOKEN_ID in got.sequences[0].tokens
    assert len(got.sequences[0].tokens) == 500


def test_the_last_token_allowed_may_be_a_stop(make_engine: MakeEngine, free_run):
    fields = {"temperature": 1.0, "seed": 1, "max_tokens": 1}
    stop = (int(free_run[0]),)
    sequence = result(
        make_engine(), request("r", prompt(6), stop_token_ids=stop, **fields)
    ).sequences[0]
    assert sequence.stop_reason == "stop"
