"""What is shown of a sample: never a stop string, never what may become one."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from server.oai.tokenizer import TextModel
from server.oai.transcript import Piece, Transcript
from tests.unit.oai import small_tokenizers as tk

MODEL = TextModel(tk.byte_level(), "")
EOS = 255


def transcript(*stops: str, offset: int = 0) -> Transcript:
    return Transcript(MODEL.stream((EOS,)), stops, (EOS,), offset)


def push(to: Transcript, tokens: bytes | list[int]) -> Piece:
    ids = np.array(list(tokens), np.int32)
    return to.push(ids, -np.arange(len(ids), dtype=np.float32))


texts = st.text(alphabet="abé", max_size=30)


@given(texts, st.lists(st.text(alphabet="abé", min_size=1, max_size=4), max_size=3), st.data())
def test_the_text_ends_before_the_first_stop_string(
    text: str, stops: list[str], data: st.DataObject
) -> None:
    tokens = text.encode()
    cuts = sorted(data.draw(st.lists(st.integers(0, len(tokens)), max_size=4)))
    watched = transcript(*stops)
    pieces = [
        push(watched, tokens[start:end])
        for start, end in zip([0, *cuts], [*cuts, len(tokens)], strict=True)
    ]
    pieces.append(watched.finish())
    # The one that is complete first ends it, as it does in the engine.
    complete = min((text.find(s) + len(s) for s in stops if s in text), default=None)
    seen = text if complete is None else text[:complete]
    starts = [seen.find(stop) for stop in stops if stop in seen]
    assert "".join(piece.text for piece in pieces) == seen[: min(starts, default=len(seen))]
    assert watched.stopped == (complete is not None)
    shown = ""
    for piece in pieces:
        for token in piece.tokens:
            assert token.offset < len(shown + piece.text)
        shown += piece.text


def test_what_may_become_a_stop_string_waits() -> None:
    watched = transcript("END")
    assert push(watched, b"The E").text == "The "
    assert push(watched, b"NE").text == "EN"
    assert push(watched, b"ND. More").text == ""
    assert watched.stopped
    assert watched.finish() == Piece("", [])


def test_tokens_come_with_their_text() -> None:
    watched = transcript("xy", offset=10)
    first = push(watched, "a€x".encode()[:3])
    assert (first.text, [one.offset for one in first.tokens]) == ("a", [10])
    second = push(watched, "a€x".encode()[3:])
    assert second.text == "€"
    assert [(one.token, one.offset) for one in second.tokens] == [
        (0xE2, 11),
        (0x82, 11),
        (0xAC, 11),
    ]
    last = watched.finish()
    assert (last.text, [one.token for one in last.tokens]) == ("x", [ord("x")])


def test_tokens_of_a_stop_string_are_not_told() -> None:
    watched = transcript("b")
    assert [one.token for one in push(watched, b"aab").tokens] == [97, 97]
    assert watched.finish().tokens == []


def test_the_end_of_a_sample_is_not_told_and_specials_have_no_text() -> None:
    watched = transcript()
    piece = push(watched, [97, 256, 98, EOS])
    assert piece.text == "ab"
    assert [one.token for one in piece.tokens] == [97, 256, 98]
    assert watched.finish() == Piece("", [])


def test_half_a_character_is_shown_in_the_end() -> None:
    watched = transcript()
    assert push(watched, [0xE2, 0x82]).text == ""
    piece = watched.finish()
    assert piece.text == "\ufffd"
    assert [one.token for one in piece.tokens] == [0xE2, 0x82]
