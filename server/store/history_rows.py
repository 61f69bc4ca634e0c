"""The tables of what was: what was used, and who did what. Nothing refers to them and they
refer to nothing, so that they outlast what they tell of."""

from __future__ import annotations

from typing import Any

from sqlalchemy import BigInteger, Index
from sqlalchemy.orm import Mapped, mapped_column

from server.store.rows import Base


class UsageRow(Base):
    """What a finished request used, stored with its result."""

    __tablename__ = "usage"
    __table_args__ = (Index("ix_usage_owner_hour", "owner", "hour"),)

    request_id: Mapped[str] = mapped_column(primary_key=True)
    kind: Mapped[str]
    owner: Mapped[str]
    session_id: Mapped[str | None]
    base_model: Mapped[str]
    hour: Mapped[int]
    """Hours since the epoch, UTC."""
    trained: Mapped[int] = mapped_column(BigInteger)
    prefilled: Mapped[int] = mapped_column(BigInteger)
    prefilled_cached: Mapped[int] = mapped_column(BigInteger)
    sampled: Mapped[int] = mapped_column(BigInteger)
    checkpoints: Mapped[int]


class AuditRow(Base):
    """One thing that somebody did, stored with what it changed."""

    __tablename__ = "audit"
    __table_args__ = (Index("ix_audit_owner_at", "owner", "at"),)

    id: Mapped[int] = mapped_column(primary_key=True)
    at: Mapped[float]
    owner: Mapped[str]
    resource: Mapped[str]
    event: Mapped[str]
    details: Mapped[dict[str, Any]]
