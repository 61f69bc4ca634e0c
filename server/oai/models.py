"""The models a caller can name: base models, and sampler checkpoints of its own or published."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from backends.contract import ModelInfo
from server.catalogue import Catalogue
from server.checkpoints.service import Checkpoints
from server.core.errors import BadInput, NotFound
from server.core.paths import CheckpointKind, parse_path
from server.core.records import Checkpoint, Tenant
from server.oai.errors import BadParameter, UnknownModel
from server.oai.tokenizer import TextModel

_SCHEME = "tinker://"
_MOST_LISTED = 1000


@dataclass(frozen=True, slots=True, kw_only=True)
class NamedModel:
    """What a name stands for."""

    name: str
    base_model: str
    info: ModelInfo
    checkpoint: Checkpoint | None = None

    def json(self) -> dict[str, Any]:
        checkpoint = self.checkpoint
        return {
            "id": self.name,
            "object": "model",
            "created": 0 if checkpoint is None else int(checkpoint.created_at),
            "owned_by": "hearth" if checkpoint is None else checkpoint.owner,
            "parent": None if checkpoint is None else self.base_model,
            "max_model_len": self.info.max_context_length,
        }


class Models:
    def __init__(
        self, catalogue: Catalogue, checkpoints: Checkpoints, folders: Mapping[str, Path]
    ) -> None:
        """`folders` are those of the base models; their tokenizers are read at the first call."""
        self._catalogue = catalogue
        self._checkpoints = checkpoints
        self._folders = folders
        self._texts: dict[str, TextModel | None] = {}
        self._loading = asyncio.Lock()

    async def named(self, tenant: Tenant, name: str) -> NamedModel:
        """Raises UnknownModel, also for what belongs to somebody else or is of another kind."""
        if name in self._catalogue:
            return NamedModel(name=name, base_model=name, info=self._catalogue.get(name).info)
        if not name.startswith(_SCHEME):
            raise UnknownModel(name)
        try:
            checkpoint = await self._checkpoints.readable(tenant.id, parse_path(name))
        except (BadInput, NotFound):
            raise UnknownModel(name) from None
        named = self._on_checkpoint(checkpoint)
        if named is None:
            raise UnknownModel(name)
        return named

    async def all(self, tenant: Tenant) -> list[NamedModel]:
        """The base models, then the tenant's own checkpoints, newest first."""
        base = [
            NamedModel(name=model.name, base_model=model.name, info=model.info)
            for model in self._catalogue
        ]
        own, _ = await self._checkpoints.page(tenant.id, _MOST_LISTED, 0)
        return [*base, *filter(None, map(self._on_checkpoint, own))]

    async def text(self, base_model: str) -> TextModel:
        """Raises BadParameter when the model has none."""
        async with self._loading:
            if base_model not in self._texts:
                folder = self._folders[base_model]
                self._texts[base_model] = await asyncio.to_thread(TextModel.load, folder)
        found = self._texts[base_model]
        if found is None:
            message = f"model {base_model!r} has no tokenizer.json, so it cannot read text here."
            raise BadParameter(message, "model")
        return found

    def adapter(self, model: NamedModel) -> str | None:
        """The folder to sample from; None for a base model. Raises UnknownModel if it is gone."""
        if model.checkpoint is None:
            return None
        if not self._checkpoints.storage.exists(model.checkpoint.folder):
            raise UnknownModel(model.name)
        return self._checkpoints.storage.path(model.checkpoint.folder)

    def _on_checkpoint(self, checkpoint: Checkpoint) -> NamedModel | None:
        sampled = checkpoint.path.kind is CheckpointKind.SAMPLER
        if not sampled or checkpoint.base_model not in self._catalogue:
            return None
        return NamedModel(
            name=str(checkpoint.path),
            base_model=checkpoint.base_model,
            info=self._catalogue.get(checkpoint.base_model).info,
            checkpoint=checkpoint,
        )
