"""The resources as the rooms pass them around: frozen values, never rows.

Times are seconds since the epoch, UTC.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from server.core.ids import RequestId, RunId, SamplingSessionId, SessionId, TenantId
from server.core.optimizers import ADAMW, Optimizer
from server.core.paths import CheckpointKind, CheckpointPath
from server.core.requests import Kind, State


@dataclass(frozen=True, slots=True, kw_only=True)
class Tenant:
    """Who is calling."""

    id: TenantId
    project: str = "default"
    name: str = "local"


class SessionStatus(StrEnum):
    ACTIVE = "active"
    FINISHED = "finished"
    """The client said so."""
    EXPIRED = "expired"
    """Its heartbeats stopped coming."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Session:
    """One client's connection; its runs and samplers are named after it."""

    id: SessionId
    owner: TenantId
    project: str
    tags: list[str]
    user_metadata: dict[str, Any]
    sdk_version: str
    display_name: str | None
    created_at: float
    last_heartbeat_at: float
    status: SessionStatus = SessionStatus.ACTIVE
    finish_reason: str | None = None
    finish_detail: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class LoraShape:
    """What of an adapter is fixed at its creation."""

    rank: int
    alpha: float
    seed: int
    train_attn: bool
    train_mlp: bool
    train_unembed: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """A training run: one adapter, its optimizer, and the requests that change them."""

    id: RunId
    session_id: SessionId | None
    """None for a run that only holds copied checkpoints."""
    owner: TenantId
    project: str
    base_model: str
    lora: LoraShape
    user_metadata: dict[str, str]
    created_at: float
    last_request_at: float
    snapshot_seq: int | None = None
    """The state on disk includes every request up to this one."""
    snapshot_folder: str | None = None
    inflight_folder: str | None = None
    """The newest weights of its `inflight` samplers."""
    optimizer: Optimizer = ADAMW


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """A journaled request: what was asked, and what came of it."""

    id: RequestId
    kind: Kind
    owner: TenantId
    seq: int
    created_at: float
    run_id: RunId | None = None
    sampling_session_id: SamplingSessionId | None = None
    payload: bytes | None = None
    """The body as it came; None once a snapshot includes it."""
    payload_type: str = "application/json"
    tokens: int = 0
    state: State = State.WAITING
    started_at: float | None = None
    """When its computing began: what came before was waiting."""
    finished_at: float | None = None
    finished_no: int | None = None
    """Grows with every finished request of the server: the cursor of retrieve_futures."""
    result: bytes | None = None
    result_type: str | None = None
    error: str | None = None
    error_category: str | None = None


class SamplerKind(StrEnum):
    BASE = "base"
    """The base model."""
    CHECKPOINT = "checkpoint"
    """A named sampler checkpoint."""
    SNAPSHOT = "snapshot"
    """A run's weights at one moment, without a name."""
    INFLIGHT = "inflight"
    """A run's newest published weights."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingSession:
    """What a SamplingClient samples from."""

    id: SamplingSessionId
    session_id: SessionId
    owner: TenantId
    base_model: str
    kind: SamplerKind
    created_at: float
    run_id: RunId | None = None
    model_path: str | None = None
    folder: str | None = None
    """The adapter in PEFT format; None for the base model and for inflight samplers."""
    clones: int = 0
    """How many client copies have been given a number."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoint:
    """Saved weights under a name."""

    run_id: RunId
    kind: CheckpointKind
    name: str
    owner: TenantId
    project: str
    base_model: str
    lora: LoraShape
    folder: str
    size_bytes: int
    created_at: float
    expires_at: float | None = None
    public: bool = False
    user_metadata: dict[str, str] = field(default_factory=dict)
    optimizer: Optimizer = ADAMW
    """Of the run it was saved from."""

    @property
    def path(self) -> CheckpointPath:
        return CheckpointPath(self.run_id, self.kind, self.name)
