"""The base models this server has, by their public names."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from backends.contract import ModelInfo
from server.core.errors import BadInput


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedModel:
    name: str
    """Hub style, as clients ask for it."""
    tokenizer_id: str
    """What clients on this machine hand to `transformers`."""
    info: ModelInfo


class Catalogue:
    def __init__(self) -> None:
        self._models: dict[str, ServedModel] = {}

    def add(self, model: ServedModel) -> None:
        self._models[model.name] = model

    def __iter__(self) -> Iterator[ServedModel]:
        return iter(self._models.values())

    def __contains__(self, name: str) -> bool:
        return name in self._models

    def get(self, name: str) -> ServedModel:
        """Raises BadInput that names what there is."""
        if found := self._models.get(name):
            return found
        served = ", ".join(self._models) or "none"
        raise BadInput(f"base_model {name[:100]!r} is not served here; served: {served}")
