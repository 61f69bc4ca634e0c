"""Which optimizer a run was made with: fixed for its life, and kept with its checkpoints."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class Optimizer:
    type: str
    version: int | None = None
    """For the families that have versions."""

    def as_json(self) -> dict[str, Any]:
        """As the SDK writes an `optimizer_config`; null there would be an error."""
        return {"type": self.type} | ({} if self.version is None else {"version": self.version})

    def __str__(self) -> str:
        return self.type if self.version is None else f"{self.type} version {self.version}"


ADAMW = Optimizer(type="adamw")
