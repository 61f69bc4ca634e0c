"""A model's tokenizer and chat template, as text goes in and out of it. No torch, no transformers:
`tokenizer.json` holds all of it."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Tokenizer

from server.oai.decoding import TextStream
from server.oai.template import ChatTemplate, TemplateRefused

_BYTE = re.compile(r"<0x([0-9A-F]{2})>")


class TextModel:
    def __init__(self, tokenizer: Tokenizer, chat: ChatTemplate | str) -> None:
        """`chat` is the template, or why there is none."""
        tokenizer.no_truncation()
        tokenizer.no_padding()
        added = tokenizer.get_added_tokens_decoder()
        vocabulary = tokenizer.get_vocab(with_added_tokens=True)
        self._tokenizer = tokenizer
        self._chat = chat
        self._added = {number: token.content for number, token in added.items()}
        self.special = frozenset(number for number, token in added.items() if token.special)
        self.longest = max(map(len, vocabulary), default=1)
        """No token spells more characters than this."""
        decoder = str(tokenizer.decoder)
        self._bytes = _byte_level() if "ByteLevel(" in decoder else None
        self._space = "▁" if "▁" in decoder else None

    @classmethod
    def load(cls, folder: Path) -> TextModel | None:
        """Of a model folder; None if it has no tokenizer that can be read here."""
        file = folder / "tokenizer.json"
        if not file.exists():
            return None
        chat: ChatTemplate | str
        try:
            chat = ChatTemplate.load(folder) or "has no chat template"
        except TemplateRefused as error:
            chat = f"cannot chat: {error}"
        return cls(Tokenizer.from_file(str(file)), chat)

    @property
    def no_chat(self) -> str | None:
        """Why it cannot chat, in words that follow its name."""
        return self._chat if isinstance(self._chat, str) else None

    def encode(self, text: str) -> np.ndarray:
        """int64[T], with what the tokenizer puts around a text (a BOS, if any)."""
        return self._encode(text, special=True)

    def encode_chat(
        self, messages: Sequence[Mapping[str, str]], variables: Mapping[str, Any]
    ) -> np.ndarray:
        """int64[T]; the template writes its special tokens itself. Raises TemplateRefused."""
        assert isinstance(self._chat, ChatTemplate)
        return self._encode(self._chat.render(messages, variables), special=False)

    def stream(self, ends: Sequence[int] = (), *, show_special: bool = False) -> TextStream:
        """`ends` are tokens that end a sample: they are no text."""
        return TextStream(self._decode, frozenset() if show_special else self.special | set(ends))

    def spelling(self, token: int) -> bytes:
        """What one token writes, which may be a part of a character."""
        if (content := self._added.get(token)) is not None:
            return content.encode()
        piece = self._tokenizer.id_to_token(token)
        if piece is None:
            return b""
        if self._bytes is not None:
            return bytes(self._bytes[char] for char in piece if char in self._bytes)
        if found := _BYTE.fullmatch(piece):
            return bytes.fromhex(found[1])
        if self._space is not None:
            return piece.replace(self._space, " ").encode()
        return self._decode([token]).encode()

    def _encode(self, text: str, *, special: bool) -> np.ndarray:
        return np.array(self._tokenizer.encode(text, add_special_tokens=special).ids, np.int64)

    def _decode(self, tokens: list[int]) -> str:
        return self._tokenizer.decode(tokens, skip_special_tokens=False)


def shown(spelling: bytes) -> str:
    """A token as OpenAI writes it where only text is possible."""
    try:
        return spelling.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in spelling)


def _byte_level() -> dict[str, int]:
    """The byte that each character of a byte-level vocabulary stands for (GPT-2's table): itself
    where it prints, else the next free one from 256 on."""
    printable = {*range(33, 127), *range(161, 173), *range(174, 256)}
    free = iter(range(256, 512))
    return {chr(byte if byte in printable else next(free)): byte for byte in range(256)}
