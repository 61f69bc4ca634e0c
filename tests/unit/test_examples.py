"""The examples are what users copy: what they may import, and that sft.py builds right datums."""

from __future__ import annotations

import ast
import importlib.util
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

EXAMPLES = Path(__file__).resolve().parents[2] / "client_examples"
ALLOWED = {"tinker", "numpy"}
ALSO_ALLOWED = {
    "custom_loss.py": {"torch"},
    "dpo.py": {"torch"},
    "quickstart.py": {"rich"},  # starts the server; not an example of the SDK
    "sft.py": {"matplotlib"},
}
SCRIPTS = sorted(EXAMPLES.glob("*.py"))


def imported_packages(script: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(script.read_text(encoding="utf-8"))):
        match node:
            case ast.Import(names=names):
                yield from (alias.name.partition(".")[0] for alias in names)
            case ast.ImportFrom(module=str(module), level=0):
                yield module.partition(".")[0]
            case ast.ImportFrom():
                yield "."  # a relative import: not a script that can be copied


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.name)
def test_an_example_imports_only_what_its_user_has(script: Path) -> None:
    foreign = set(imported_packages(script)) - sys.stdlib_module_names
    assert foreign <= ALLOWED | ALSO_ALLOWED.get(script.name, set())


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.name)
def test_an_example_says_how_it_is_run_and_stays_short(script: Path) -> None:
    text = script.read_text(encoding="utf-8")
    assert f"{script.name} " in (ast.get_docstring(ast.parse(text)) or "")
    if script.name not in {"sft.py", "quickstart.py"}:
        assert text.count("\n") <= 130


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.name)
def test_every_example_is_in_the_readme(script: Path) -> None:
    assert script.name in (EXAMPLES / "README.md").read_text(encoding="utf-8")


class LetterTokenizer:
    """One token a letter, and a chat template a person can read."""

    def apply_chat_template(
        self, messages: list[dict[str, str]], *, tokenize: bool, add_generation_prompt: bool = False
    ) -> str:
        assert not tokenize
        turns = [f"<{message['role']}>{message['content']}#\n" for message in messages]
        return "".join([*turns, "<assistant>" if add_generation_prompt else ""])

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        assert not add_special_tokens
        return [ord(letter) for letter in text]


@pytest.fixture(scope="module")
def sft() -> ModuleType:
    spec = importlib.util.spec_from_file_location("sft_example", EXAMPLES / "sft.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


def letters(tokens: Any) -> str:
    return "".join(map(chr, tokens))


def test_targets_are_shifted_by_one_and_the_prompt_has_no_weight(sft: ModuleType) -> None:
    datum = sft.make_datum(LetterTokenizer(), "hi?", "Arr!")
    tokens = datum.model_input.to_ints()
    targets = datum.loss_fn_inputs["target_tokens"].tolist()
    weights = datum.loss_fn_inputs["weights"].tolist()

    assert letters(tokens) == "<user>hi?#\n<assistant>Arr!"
    assert tokens[1:] == targets[:-1]
    assert letters(target for target, weight in zip(targets, weights, strict=True) if weight) == (
        "Arr!#"  # the end of the turn is learned, the newline after it is not
    )
    assert set(weights) == {0.0, 1.0}


def test_what_travels_is_int64_targets_and_float32_weights_of_equal_length(
    sft: ModuleType,
) -> None:
    datum = sft.make_datum(LetterTokenizer(), "a?", "b")
    inputs = datum.loss_fn_inputs
    assert {name: tensor.dtype for name, tensor in inputs.items()} == {
        "target_tokens": "int64",
        "weights": "float32",
    }
    assert {tuple(tensor.shape) for tensor in inputs.values()} == {(datum.model_input.length,)}


def test_the_data_is_in_the_style_it_teaches_and_holds_its_questions_out(sft: ModuleType) -> None:
    data = json.loads((EXAMPLES / "pirate.json").read_text(encoding="utf-8"))
    answers = [answer for _, answer in data["train"]]
    assert [answer for answer in answers if not sft.is_pirate(answer)] == []
    assert {question for question, _ in data["train"]}.isdisjoint(data["held_out"])


def test_plain_answers_are_no_pirates(sft: ModuleType) -> None:
    assert not sft.is_pirate("The capital of France is Paris! It has been for a long time.")
    assert not sft.is_pirate("Arr, matey! The capital of France is Paris.")
    assert sft.is_pirate("Arr, matey! Paris be the capital.")


def test_batches_go_through_all_data_before_they_repeat_any(sft: ModuleType) -> None:
    batches = sft.make_batches(list(range(6)), batch_size=4, steps=3, seed=0)
    assert [len(batch) for batch in batches] == [4, 4, 4]
    stream = [item for batch in batches for item in batch]
    assert sorted(stream[:6]) == sorted(stream[6:]) == list(range(6))
    assert batches == sft.make_batches(list(range(6)), batch_size=4, steps=3, seed=0)


def test_the_text_chart_is_as_high_as_its_largest_value(sft: ModuleType) -> None:
    assert sft.text_chart([2.0, 1.0, 0.5], height=2).splitlines() == [
        "  2.00 ┤██    ",
        "  1.00 ┤████▄▄",
        "       └──────",
    ]


def test_a_loss_that_stays_where_it_was_did_not_fall(sft: ModuleType) -> None:
    assert sft.loss_fell([3.0, 2.5, 2.9, 1.0, 1.2, 1.1])
    assert not sft.loss_fell([2.0] * 6)
