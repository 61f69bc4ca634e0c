"""A tokenizer with words, for stop strings that begin or end in the middle of a token."""

from __future__ import annotations

import json
from pathlib import Path

DOTS = 1
WORD = 2
MARK = 3
_WORDS = {DOTS: "...", WORD: "END", MARK: "<|eot|>"}


def with_words(path: Path) -> Path:
    """Give three control characters of the byte-level tokenizer other meanings: two words of
    several characters and a special token. Gives back `path`."""
    file = path / "tokenizer.json"
    tokenizer = json.loads(file.read_text())
    vocab = tokenizer["model"]["vocab"]
    by_id = {number: piece for piece, number in vocab.items()}
    for number, word in _WORDS.items():
        del vocab[by_id[number]]
        vocab[word] = number
    special = dict(tokenizer["added_tokens"][0], id=MARK, content=_WORDS[MARK])
    tokenizer["added_tokens"].insert(0, special)
    file.write_text(json.dumps(tokenizer))
    return path
