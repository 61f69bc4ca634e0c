"""The tables. A row never leaves `store/` and the resources' `queries.py`: `value` turns one
into the frozen record that the rest of the service sees."""

from __future__ import annotations

from dataclasses import asdict, fields, is_dataclass
from enum import Enum
from typing import Any, TypeVar

from sqlalchemy import (
    JSON,
    BigInteger,
    ForeignKey,
    Index,
    LargeBinary,
    MetaData,
    UniqueConstraint,
)
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column

from server.core.optimizers import Optimizer
from server.core.paths import CheckpointKind
from server.core.records import LoraShape, SamplerKind, SessionStatus
from server.core.requests import Kind, State

Record = TypeVar("Record")


class Base(DeclarativeBase):
    # Named constraints, so that migrations can refer to them on every database.
    metadata = MetaData(
        naming_convention={
            "ix": "ix_%(table_name)s_%(column_0_N_name)s",
            "uq": "uq_%(table_name)s_%(column_0_N_name)s",
            "ck": "ck_%(table_name)s_%(constraint_name)s",
            "fk": "fk_%(table_name)s_%(column_0_N_name)s_%(referred_table_name)s",
            "pk": "pk_%(table_name)s",
        }
    )
    type_annotation_map = {  # noqa: RUF012
        dict[str, Any]: JSON,
        dict[str, str]: JSON,
        list[str]: JSON,
        bytes: LargeBinary,
    }


class ApiKeyRow(Base):
    """A key as its SHA-256: the key itself is shown once and kept nowhere."""

    __tablename__ = "api_keys"

    digest: Mapped[str] = mapped_column(primary_key=True)
    name: Mapped[str]
    tenant: Mapped[str] = mapped_column(index=True)
    project: Mapped[str]
    created_at: Mapped[float]
    revoked_at: Mapped[float | None]


class SessionRow(Base):
    __tablename__ = "sessions"
    __table_args__ = (UniqueConstraint("owner", "idempotency_key"),)

    id: Mapped[str] = mapped_column(primary_key=True)
    owner: Mapped[str] = mapped_column(index=True)
    project: Mapped[str]
    tags: Mapped[list[str]]
    user_metadata: Mapped[dict[str, Any]]
    sdk_version: Mapped[str]
    display_name: Mapped[str | None]
    created_at: Mapped[float] = mapped_column(index=True)
    last_heartbeat_at: Mapped[float]
    status: Mapped[str] = mapped_column(index=True)
    finish_reason: Mapped[str | None]
    finish_detail: Mapped[str | None]
    idempotency_key: Mapped[str | None]


class RunRow(Base):
    __tablename__ = "runs"

    id: Mapped[str] = mapped_column(primary_key=True)
    session_id: Mapped[str | None] = mapped_column(ForeignKey("sessions.id"), index=True)
    owner: Mapped[str] = mapped_column(index=True)
    project: Mapped[str]
    base_model: Mapped[str]
    lora: Mapped[dict[str, Any]]
    user_metadata: Mapped[dict[str, str]]
    created_at: Mapped[float] = mapped_column(index=True)
    last_request_at: Mapped[float]
    snapshot_seq: Mapped[int | None] = mapped_column(BigInteger)
    snapshot_folder: Mapped[str | None]
    inflight_folder: Mapped[str | None]
    optimizer: Mapped[dict[str, Any]]


class RequestRow(Base):
    """The journal."""

    __tablename__ = "requests"
    __table_args__ = (
        UniqueConstraint("run_id", "seq"),
        UniqueConstraint("sampling_session_id", "seq"),
        Index("ix_requests_state_kind", "state", "kind"),
        Index("ix_requests_sampling_session_id_finished_no", "sampling_session_id", "finished_no"),
    )

    id: Mapped[str] = mapped_column(primary_key=True)
    kind: Mapped[str]
    owner: Mapped[str] = mapped_column(index=True)
    seq: Mapped[int] = mapped_column(BigInteger)
    created_at: Mapped[float]
    run_id: Mapped[str | None] = mapped_column(ForeignKey("runs.id"))
    sampling_session_id: Mapped[str | None] = mapped_column(ForeignKey("sampling_sessions.id"))
    payload: Mapped[bytes | None]
    payload_type: Mapped[str]
    tokens: Mapped[int]
    state: Mapped[str]
    started_at: Mapped[float | None]
    finished_at: Mapped[float | None] = mapped_column(index=True)
    finished_no: Mapped[int | None] = mapped_column(BigInteger)
    result: Mapped[bytes | None]
    result_type: Mapped[str | None]
    error: Mapped[str | None]
    error_category: Mapped[str | None]


class SamplingSessionRow(Base):
    __tablename__ = "sampling_sessions"

    id: Mapped[str] = mapped_column(primary_key=True)
    session_id: Mapped[str] = mapped_column(ForeignKey("sessions.id"), index=True)
    owner: Mapped[str] = mapped_column(index=True)
    base_model: Mapped[str]
    kind: Mapped[str]
    created_at: Mapped[float]
    run_id: Mapped[str | None] = mapped_column(ForeignKey("runs.id"))
    model_path: Mapped[str | None]
    folder: Mapped[str | None]
    clones: Mapped[int]


class CheckpointRow(Base):
    __tablename__ = "checkpoints"

    run_id: Mapped[str] = mapped_column(ForeignKey("runs.id"), primary_key=True)
    kind: Mapped[str] = mapped_column(primary_key=True)
    name: Mapped[str] = mapped_column(primary_key=True)
    owner: Mapped[str] = mapped_column(index=True)
    project: Mapped[str]
    base_model: Mapped[str]
    lora: Mapped[dict[str, Any]]
    folder: Mapped[str]
    size_bytes: Mapped[int] = mapped_column(BigInteger)
    created_at: Mapped[float] = mapped_column(index=True)
    expires_at: Mapped[float | None] = mapped_column(index=True)
    public: Mapped[bool]
    user_metadata: Mapped[dict[str, str]]
    optimizer: Mapped[dict[str, Any]]


_ENUMS: dict[str, dict[str, type[Enum]]] = {
    "Session": {"status": SessionStatus},
    "Request": {"kind": Kind, "state": State},
    "SamplingSession": {"kind": SamplerKind},
    "Checkpoint": {"kind": CheckpointKind},
}

_PARTS: dict[str, type[Any]] = {"lora": LoraShape, "optimizer": Optimizer}


def value(record: type[Record], row: Base) -> Record:
    """The record of that name, field by field; what has fields of its own is stored as JSON."""
    assert is_dataclass(record)
    values = {field.name: getattr(row, field.name) for field in fields(record)}
    for name, enum in _ENUMS.get(record.__name__, {}).items():
        values[name] = enum(values[name])
    for name, part in _PARTS.items():
        if name in values:
            values[name] = part(**values[name])
    return record(**values)


def columns(record: Any) -> dict[str, Any]:
    """A record as column values, for insert."""
    values = {field.name: getattr(record, field.name) for field in fields(record)}
    for name, member in values.items():
        if isinstance(member, Enum):
            values[name] = member.value
        elif isinstance(member, tuple(_PARTS.values())):
            values[name] = asdict(member)
    return values
