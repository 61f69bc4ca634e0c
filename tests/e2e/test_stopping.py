"""Where a sample ends: the four forms of `stop`, and stop strings that do not respect tokens.

A run is trained to say one text, so that every test knows what comes."""

from __future__ import annotations

from typing import Any

import pytest
import tinker
from tinker import types

from tests.e2e.client import new_run, prompt, sampler_of, sft, train, wait
from tests.e2e.speech import DOTS, MARK, WORD
from tests.tiny_models import EOS_TOKEN_ID

START = list(b"say:")
SAID = [*b"abc", DOTS, *"d\u00e9f".encode(), WORD, MARK, *b"ghij", EOS_TOKEN_ID, *b"xyz"]


@pytest.fixture(scope="module")
def parrot(service: tinker.ServiceClient) -> tinker.SamplingClient:
    run = new_run(service, seed=1, rank=16)
    whole = sft([*START, *SAID])
    train(run, 40, [whole])
    return sampler_of(run)


def say(parrot: tinker.SamplingClient, **params: Any) -> tuple[list[int], str]:
    sampled = parrot.sample(
        prompt(START), 1, types.SamplingParams(max_tokens=len(SAID), temperature=0.0, **params)
    )
    sequence = wait(sampled).sequences[0]
    return sequence.tokens, sequence.stop_reason


def upto(token: int) -> list[int]:
    return SAID[: SAID.index(token) + 1]


def test_without_a_stop_a_sample_ends_with_the_end_of_sequence(
    parrot: tinker.SamplingClient,
) -> None:
    assert say(parrot) == (upto(EOS_TOKEN_ID), "stop")


def test_an_empty_list_stops_at_nothing_not_even_the_end_of_sequence(
    parrot: tinker.SamplingClient,
) -> None:
    assert say(parrot, stop=[]) == (SAID, "length")


def test_a_token_id_stops_and_is_kept(parrot: tinker.SamplingClient) -> None:
    """public-reports E64: integer ids are honoured."""
    assert say(parrot, stop=[ord("g")]) == (upto(ord("g")), "stop")
    assert say(parrot, stop=[ord("?"), WORD, ord("g")]) == (upto(WORD), "stop")


@pytest.mark.parametrize("as_list", [False, True])
@pytest.mark.parametrize(
    ("string", "last"),
    [
        ("c", ord("c")),
        ("bc", ord("c")),  # spans two tokens
        ("..", DOTS),  # inside a token; E64: the whole token is returned
        ("c.", DOTS),  # ends in the middle of a token
        (".d", ord("d")),  # begins in the middle of one
        ("...d", ord("d")),
        ("\u00e9", 0xA9),  # two tokens that are one character
        ("d\u00e9f", ord("f")),
        ("fEN", WORD),
        ("<|eot|>", MARK),  # a special token, by its text
        ("|>g", ord("g")),
        ("abc...d\u00e9fEND", WORD),
    ],
)
def test_a_string_stops_with_the_token_that_completes_it(
    parrot: tinker.SamplingClient, string: str, last: int, as_list: bool
) -> None:
    """public-reports E64"""
    stop = [string, "never said"] if as_list else string
    assert say(parrot, stop=stop) == (upto(last), "stop")


def test_of_several_strings_the_first_to_be_complete_stops(
    parrot: tinker.SamplingClient,
) -> None:
    assert say(parrot, stop=["ghij", "END", "hi"]) == (upto(WORD), "stop")


def test_a_string_in_the_prompt_does_not_stop(parrot: tinker.SamplingClient) -> None:
    assert say(parrot, stop=["say:", "hi"]) == (upto(ord("i")), "stop")


def test_a_string_that_begins_in_the_prompt_does_not_stop(
    parrot: tinker.SamplingClient,
) -> None:
    tokens, reason = say(parrot, stop=[":a", "fE"])
    assert (tokens, reason) == (upto(WORD), "stop")


def test_a_character_that_is_not_complete_does_not_stop_as_another(
    parrot: tinker.SamplingClient,
) -> None:
    """The first byte of a character is shown as U+FFFD until the second is there."""
    tokens, _ = say(parrot, stop=["\ufffd", "END"])
    assert tokens == upto(WORD)


def test_logprobs_have_the_length_of_the_tokens_when_stopped(
    parrot: tinker.SamplingClient,
) -> None:
    sampled = wait(
        parrot.sample(
            prompt(START),
            3,
            types.SamplingParams(max_tokens=30, temperature=0.0, stop=".."),
            topk_sample_logprobs=2,
        )
    )
    for sequence in sampled.sequences:
        assert sequence.tokens == upto(DOTS)
        assert len(sequence.logprobs) == len(sequence.topk_logprobs) == len(sequence.tokens)
