"""Small tokenizers of the kinds that models have."""

from __future__ import annotations

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from tests.tiny_models import _byte_chars

WORDS = ["▁Hello", "▁world", "▁", "é", "a", "b", "!", "▁a"]
BOS, EOS = 0, 1


def byte_level() -> Tokenizer:
    """Token i is byte i; 256 is special, 257 spells two bytes of a character."""
    chars = _byte_chars()
    vocab = {char: byte for byte, char in enumerate(chars)}
    vocab["<s>"] = 256
    vocab[chars[0xE2] + chars[0x82]] = 257
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[(chars[0xE2], chars[0x82])]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken("<s>", special=True)])
    return tokenizer


def byte_fallback() -> Tokenizer:
    """As Llama 2 has it: words with `▁` for a space, and a token for each byte."""
    pieces = ["<s>", "</s>", "<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), *WORDS]
    vocab = {piece: number for number, piece in enumerate(pieces)}
    model = models.BPE(vocab=vocab, merges=[], unk_token="<unk>", byte_fallback=True)
    tokenizer = Tokenizer(model)
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(content=" ", left=1),
        ]
    )
    tokenizer.add_special_tokens(
        [AddedToken("<s>", special=True), AddedToken("</s>", special=True)]
    )
    return tokenizer


def byte_token(byte: int) -> int:
    return 3 + byte


def word_token(word: str) -> int:
    return 3 + 256 + WORDS.index(word)
