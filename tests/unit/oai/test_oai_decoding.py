"""Text that is shown while its tokens come is the text that they have together."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer

from server.oai.tokenizer import TextModel, shown
from tests.unit.oai import small_tokenizers as tk

BYTE_LEVEL, BYTE_FALLBACK = tk.byte_level(), tk.byte_fallback()
MODELS = {"level": TextModel(BYTE_LEVEL, ""), "fallback": TextModel(BYTE_FALLBACK, "")}


def pieces(model: TextModel, tokens: list[int], ends: tuple[int, ...] = ()) -> list[str]:
    stream = model.stream(ends)
    return [*map(stream.push, tokens), stream.flush()]


def whole(tokenizer: Tokenizer, tokens: list[int]) -> str:
    return tokenizer.decode(tokens, skip_special_tokens=True)


@given(st.lists(st.integers(0, 257), max_size=120))
def test_any_bytes_at_all(tokens: list[int]) -> None:
    assert "".join(pieces(MODELS["level"], tokens)) == whole(BYTE_LEVEL, tokens)


@given(st.integers(128, 255), st.integers(33, 90), st.text(max_size=5))
def test_a_long_run_of_bytes_that_are_no_text(byte: int, length: int, text: str) -> None:
    tokens = [*([byte] * length), *text.encode()]
    shown_ = pieces(MODELS["level"], tokens)
    assert "".join(shown_) == whole(BYTE_LEVEL, tokens)
    assert any(shown_[:-1]), "nothing is held back for ever"


@given(st.text(max_size=60))
def test_text_comes_character_by_character(text: str) -> None:
    """But for U+FFFD itself, which looks like a character that is not whole yet."""
    text = text.replace("\ufffd", "")
    tokens = list(text.encode())
    assert [piece for piece in pieces(MODELS["level"], tokens) if piece] == list(text)


@given(st.lists(st.sampled_from([*tk.WORDS, "</s>", "€", "😀", "ü"]), max_size=60))
def test_bytes_as_tokens_and_spaces_in_words(words: list[str]) -> None:
    tokens = []
    for word in words:
        if word in tk.WORDS:
            tokens.append(tk.word_token(word))
        elif word == "</s>":
            tokens.append(tk.EOS)
        else:
            tokens += map(tk.byte_token, word.encode())
    expected = whole(BYTE_FALLBACK, tokens)
    assert "".join(pieces(MODELS["fallback"], tokens)) == expected


def test_a_token_costs_the_same_however_long_the_text() -> None:
    stream = MODELS["level"].stream()
    longest = 0
    for token in [*("täxt €".encode() * 50), *([0xFF] * 200)]:
        stream.push(token)
        longest = max(longest, len(stream._window))
    assert longest < 40


def test_what_ends_a_sample_is_no_text() -> None:
    assert "".join(pieces(MODELS["level"], [65, 66, 67], ends=(67,))) == "AB"


@pytest.mark.parametrize(
    ("model", "token", "spelling"),
    [
        ("level", 0xE2, b"\xe2"),
        ("level", 257, b"\xe2\x82"),
        ("level", 256, b"<s>"),
        ("level", 32, b" "),
        ("level", 100_000, b""),
        ("fallback", tk.byte_token(0xE2), b"\xe2"),
        ("fallback", tk.word_token("▁Hello"), b" Hello"),
        ("fallback", tk.word_token("é"), "é".encode()),
    ],
)
def test_every_token_has_its_bytes(model: str, token: int, spelling: bytes) -> None:
    assert MODELS[model].spelling(token) == spelling


def test_a_part_of_a_character_is_shown_as_bytes() -> None:
    assert shown(b"\xe2\x82") == "bytes:\\xe2\\x82"
    assert shown("€".encode()) == "€"
