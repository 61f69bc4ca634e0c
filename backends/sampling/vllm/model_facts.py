"""What must be known of a base model beside its vLLM: read from its folder, without torch."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tokenizers import Tokenizer

from backends.contract import BackendError
from backends.sampling.stops import Decoder


class FileTokenizer:
    """Of `tokenizer.json`. A `Decoder`."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer

    def decode(
        self,
        token_ids: Sequence[int],
        *,
        skip_special_tokens: bool,
        clean_up_tokenization_spaces: bool,
    ) -> str:
        assert not clean_up_tokenization_spaces
        return self._tokenizer.decode(token_ids, skip_special_tokens=skip_special_tokens)


@dataclass(frozen=True, slots=True)
class ModelFacts:
    vocab_size: int
    max_context_length: int
    decoder: Decoder

    @classmethod
    def read(cls, folder: Path) -> ModelFacts:
        """Raises BackendError when the folder holds no model."""
        try:
            config = json.loads((folder / "config.json").read_bytes())
            return cls(
                vocab_size=config["vocab_size"],
                max_context_length=config["max_position_embeddings"],
                decoder=FileTokenizer(Tokenizer.from_file(str(folder / "tokenizer.json"))),
            )
        # `tokenizers` raises plain Exception for a file it cannot read; OSError is not one of them.
        except (OSError, ValueError, KeyError) as error:
            raise BackendError(f"no model can be read from {folder}: {error}") from error
