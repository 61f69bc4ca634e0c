"""A sampled sequence as it is remembered, so that it can be trained on by its name."""

from __future__ import annotations

from dataclasses import dataclass

from server.core.ids import SessionId, TenantId

LIFETIME_S = 24 * 3600.0
"""From sampling, and again from every training request that uses the sequence (Tinker
documentation, "StableReinforce", "Sampling with stability info")."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedSequence:
    id: str
    """Its `sequence_id`."""
    owner: TenantId
    session_id: SessionId
    prompt_length: int
    tokens: bytes
    """int32[G], little-endian."""
    logprobs: bytes
    """float32[G], little-endian: of the model that sampled, not tempered and not filtered."""
    expires_at: float

    @property
    def num_sampled(self) -> int:
        return len(self.tokens) // 4
